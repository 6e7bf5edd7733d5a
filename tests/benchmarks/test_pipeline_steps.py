"""Tests of benchmark (y): it measures delegated runs, and whole steps."""

from __future__ import annotations

from collections import Counter

from atoll.pipelines.entries import Times
from atoll.pipelines.schedules import schedule
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.virtual.cluster import VirtualCluster
from benchmarks.micro.pipeline_steps import STEP_SIZES, begin, train
from benchmarks.micro.table import BENCHMARKS
from benchmarks.paper.schedules import make_training

STAGES, MICRO_BATCHES, STEPS = 4, 8, 3


def test_a_step_is_one_launch_of_the_client_and_one_message_from_each_host():
    cluster = VirtualCluster(f"{STAGES}x1x1")
    client = cluster.client()
    table = schedule("1f1b", STAGES, MICRO_BATCHES)
    groups = [[device] for device in client.devices]
    training = cluster.run(make_training(client, groups, table, Times(), STEP_SIZES))
    weights = cluster.run(train(client, training, cluster.run(begin(client, training)), 3))
    received: Counter[type] = Counter()
    handle = cluster.controller.handle

    def handled(event: e.AnyEvent) -> object:
        if isinstance(event, e.Received):
            received[type(event.message)] += 1
        return handle(event)

    cluster.controller.handle = handled  # type: ignore[method-assign, assignment]
    cluster.run(train(client, training, weights, STEPS))
    assert received[m.Launch] == STEPS
    assert received[m.RunProgress] == STAGES * STEPS
    assert received[m.Done] == 0


def test_the_controllers_time_of_a_step_has_a_target():
    (row,) = [each for each in BENCHMARKS if each.key == "y"]
    (target,) = [metric.target for metric in row.metrics if metric.name == "controller"]
    assert target is not None
    assert (target.describe("ms", ""), "S=16, M=64" in row.title) == ("≤ 5 ms", True)
    assert (target.reached(5.0), target.reached(5.1)) == (True, False)
