"""Tests of training steps in the paper's tables: the work of their programs, and durations as predicted by theory."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from atoll.devices.null.model import MODELS
from atoll.virtual.cluster import VirtualCluster
from atoll.virtual.simulated_costs import Costs
from benchmarks.harness.record import record_benchmark
from benchmarks.paper import data_parallel, gpipe, spmd, table1_figure
from benchmarks.paper.figure import Options
from benchmarks.paper.pipeline import Pipeline
from benchmarks.paper.table2 import batch_tokens, pipeline
from benchmarks.paper.training import step_seconds

SMALL = Pipeline(
    stages=4,
    micro_batches=8,
    forward=0.01,
    backward=0.02,
    update=0.005,
    activation_bytes=1 << 10,
    gradient_bytes=1 << 20,
    weight_bytes=1 << 20,
)


def test_the_command_does_not_import_jax():
    program = "import sys, benchmarks.paper.figures; sys.exit('jax' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", program), timeout=60).returncode == 0


def test_a_pipeline_whose_stages_are_islands_takes_what_theory_gives():
    cluster = VirtualCluster("4x1x2")
    client = cluster.client()
    training = cluster.run(gpipe.make_training(client, client.islands, SMALL))
    seconds = cluster.run(step_seconds(cluster, client, training, steps=3))
    assert SMALL.ideal_seconds <= seconds <= 1.02 * SMALL.ideal_seconds


def test_all_of_a_pipelines_nodes_run():
    """No node is omitted because its results are unused."""
    cluster = VirtualCluster("1x4x2")
    client = cluster.client()
    training = cluster.run(gpipe.make_training(client, client.hosts, SMALL))
    cluster.run(step_seconds(cluster, client, training, steps=1))
    last = [span.sequence for span in cluster.controller.trace.spans() if span.program == "step" and span.host == 3]
    # Forward and backward passes of the last stage, with a transfer to and from it for each, and its update, for 5
    # steps.
    assert len(last) == 5 * (2 * 8 + 2 * 8 + 1)


def test_a_step_that_is_one_computation_takes_what_it_takes():
    cluster = VirtualCluster("1x4x2")
    client = cluster.client()
    training = cluster.run(spmd.make_training(client, client.devices, 0.05, weight_bytes=1 << 20))
    assert cluster.run(step_seconds(cluster, client, training, steps=10)) == pytest.approx(0.05, rel=0.01)


def test_table_1s_claims_in_virtual_time_can_fail():
    """A controller that is ten times as slow misses the claims, although steps in flight hide its time."""
    (point,) = (each for each in table1_figure.FIGURE.points(Options(null=True)) if each.point["model"] == "T5_3B")
    cores, ideal = int(point.point["cores"]), 0.1

    def judged(costs: Costs) -> tuple[float, bool | None]:
        seconds, read = table1_figure.simulate(cores, ideal, 1 << 20, steps=2, costs=costs)
        values = {
            "Atoll": [{"tokens": 1 / seconds, "step": 1e3 * seconds, "read_step": 1e3 * read}],
            "ideal": [{"tokens": 1 / ideal, "step": 1e3 * ideal, "read_step": 1e3 * ideal}],
        }
        record = record_benchmark(point, list(point.contestants), values, {})
        (claim,) = table1_figure.FIGURE.claims([record], Options(null=True))
        return ideal / seconds, claim.reached

    assert judged(Costs(controller_gang_host=1e-5)) == (pytest.approx(1.0, abs=0.01), True)
    assert judged(Costs(controller_gang_host=1e-4)) == (pytest.approx(1.0, abs=0.01), False)


def test_two_islands_exchange_gradients_both_ways_at_once():
    cluster = VirtualCluster("2x2x2", msgspec.structs.replace(MODELS["tpu-v3"], dcn_bandwidth=2e9))
    client = cluster.client()
    # A host sends the parts of two devices, which takes 20 ms.
    training = cluster.run(
        data_parallel.make_training(client, client.islands, 0.1, weight_bytes=1 << 20, gradient_bytes=20_000_000)
    )
    assert cluster.run(step_seconds(cluster, client, training, steps=5)) == pytest.approx(0.12, rel=0.02)


def test_table_2s_pipelines_do_the_same_work_at_any_number_of_stages():
    few, many = pipeline(4, 16, 128), pipeline(16, 64, 128)
    assert 4 * many.forward == pytest.approx(few.forward)
    assert batch_tokens(128) == 2048 * 1024
    assert 0.96 < few.ideal_seconds / many.ideal_seconds < 1.0
