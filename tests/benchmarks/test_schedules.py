"""Schedules on null devices, in virtual time: steps take what the tables say."""

from __future__ import annotations

import pytest

from atoll.devices.null.model import MODELS
from atoll.engines.virtual.cluster import VirtualCluster
from atoll.pipelines.entries import Times
from atoll.pipelines.schedules import SCHEDULES, schedule
from benchmarks.paper.schedules import Sizes, make_training
from benchmarks.paper.training import step_seconds

UNIT = 0.05


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_step_takes_what_its_table_says_within_a_hundredth(name: str) -> None:
    cluster = VirtualCluster("4x1x1", MODELS["tpu-v3"])
    client = cluster.client()
    table = schedule(name, 4, 8)
    groups = [[device] for device in client.devices]
    training = cluster.run(make_training(client, groups, table, Times(), Sizes(UNIT, 1 << 20)))
    seconds = cluster.run(step_seconds(cluster, client, training, 2))
    assert seconds == pytest.approx(UNIT * table.check().length, rel=0.01)
