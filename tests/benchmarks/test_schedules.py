"""Tests of schedules on null devices in virtual time: steps take the times in the tables."""

from __future__ import annotations

import pytest

from atoll.devices.null.model import MODELS
from atoll.pipelines.entries import Times
from atoll.pipelines.schedules import SCHEDULES, schedule
from atoll.virtual.cluster import VirtualCluster
from benchmarks.paper.schedules import Sizes, make_training
from benchmarks.paper.training import step_seconds

UNIT = 0.05


def train(name: str, stages: int, microbatches: int, kept_bytes: int = 4) -> tuple[float, list[int]]:
    """Return the seconds of a step, and the peak memory of each stage's device in bytes, according to the memory
    ledger.
    """
    cluster = VirtualCluster(f"{stages}x1x1", MODELS["tpu-v3"])
    client = cluster.client()
    table = schedule(name, stages, microbatches)
    groups = [[device] for device in client.devices]
    sizes = Sizes(UNIT, 1 << 20, kept_bytes)
    training = cluster.run(make_training(client, groups, table, Times(), sizes))
    seconds = cluster.run(step_seconds(cluster, client, training, 2))
    peak = cluster.controller.ledger.peak
    return seconds, [peak[device] for device in sorted(peak)]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_step_takes_what_its_table_says_within_a_hundredth(name: str) -> None:
    seconds, _ = train(name, 4, 8)
    assert seconds == pytest.approx(UNIT * schedule(name, 4, 8).check().length, rel=0.01)


@pytest.mark.parametrize(("name", "microbatches"), [("1f1b", 8), ("1f1b", 24), ("zb-h1", 24), ("gpipe", 24)])
def test_stages_hold_in_memory_what_the_table_says_and_room_for_one_more(name: str, microbatches: int) -> None:
    """Memory is reserved before an entry is enqueued, so that the next forward entry's memory is in use during a
    backward one.
    """
    kept = 100 << 20
    _, peaks = train(name, 4, microbatches, kept)
    held = schedule(name, 4, microbatches).check().held
    expected = [min(each + 1, microbatches) for each in held]
    if name == "1f1b":
        expected[-1] = 0  # the last stage keeps nothing, because its two entries are one node
    assert [peak // kept for peak in peaks] == expected
