"""Tests of the resources that islands request from Ray, and of the messages about missing ones."""

from __future__ import annotations

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.engines.ray.bundles import Demand, Node, demand_of, lack_text
from atoll.engines.start_engine import check_settings
from atoll.errors import SettingsError


def settings(islands: str = "2x2x4", platform: str = "cpu", **more: str) -> ClusterSettings:
    return ClusterSettings(islands, platform, engine="ray", **{f"ray_{name}": value for name, value in more.items()})


@pytest.mark.parametrize(
    ("asked", "demand"),
    [
        (settings(), Demand({"CPU": 1}, 2)),
        (settings(platform="cuda"), Demand({"CPU": 1, "GPU": 4}, 2)),
        (settings(platform="tpu"), Demand({"CPU": 1, "TPU": 4}, 2)),
        (settings(platform="null"), Demand({"CPU": 1}, 1)),  # one process serves all hosts of an island
        (settings(resources="CPU=8, rack=1"), Demand({"CPU": 8, "rack": 1}, 2)),
        (settings(resources="CPU=0,rack=0.5"), Demand({"rack": 0.5}, 2)),
        (settings(labels="zone=a", strategy="PACK"), Demand({"CPU": 1}, 2, {"zone": "a"}, "PACK")),
    ],
)
def test_an_island_asks_for_a_bundle_for_each_of_its_hosts(asked: ClusterSettings, demand: Demand) -> None:
    assert demand_of(asked, asked.topology.shapes[0]) == demand


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (settings(resources="CPU"), "'CPU' is not a Ray resource: expected NAME=VALUE, such as GPU=4"),
        (settings(resources="CPU=many"), "invalid amount 'many' of the resource CPU"),
        (settings(resources="CPU=0"), "at least one Ray resource"),
        (settings(labels="zone"), "'zone' is not a Ray label"),
        (settings(strategy="FAR"), "there is no Ray strategy 'FAR'; the known ones are: STRICT_SPREAD"),
    ],
)
def test_what_ray_cannot_be_asked_for_is_refused_before_anything_starts(wrong: ClusterSettings, text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        check_settings(wrong)
    assert text in str(raised.value)


def node(name: str, cpus: float, free: float, gpus: float = 0, **labels: str) -> Node:
    return Node(name, {"CPU": cpus, "GPU": gpus}, {"CPU": free, "GPU": gpus}, labels)


@pytest.mark.parametrize(
    ("demand", "nodes", "text"),
    [
        (
            Demand({"CPU": 1}, 2),
            [node("a", 4, 4)],
            "Ray is asked for 2 x (CPU 1) on 2 nodes; of its 1 node, 1 node can have that; --ray-strategy PACK lets "
            "hosts share a node",
        ),
        (
            Demand({"CPU": 1, "GPU": 4}, 1),
            [node("a", 4, 4), node("b", 4, 4, 2)],
            "Ray is asked for (CPU 1, GPU 4); of its 2 nodes, none can have that (the most on one: GPU 2)",
        ),
        (
            Demand({"CPU": 1}, 2, {"zone": "a"}),
            [node("a", 4, 4, zone="a"), node("b", 4, 4, zone="b")],
            "Ray is asked for 2 x (CPU 1, label zone=a) on 2 nodes; of its 2 nodes, 1 node can have that, since 1 has "
            "these labels; --ray-strategy PACK lets hosts share a node",
        ),
        (
            Demand({"CPU": 2}, 2),
            [node("a", 4, 4), node("b", 4, 1), node("c", 1, 1)],
            "Ray is asked for 2 x (CPU 2) on 2 nodes; 2 nodes could have that, of which 1 now: b has CPU 1 of 4 free",
        ),
        (Demand({"CPU": 1}, 1, {"zone": "!b"}), [node("a", 4, 4)], "Ray is asked for (CPU 1, label zone=!b)"),
        (Demand({"CPU": 1}, 1), [], "Ray is asked for (CPU 1); of its 0 nodes, none can have that"),
    ],
)
def test_what_ray_lacks_is_named(demand: Demand, nodes: list[Node], text: str) -> None:
    assert lack_text(demand, nodes) == text


def test_nodes_that_ray_drains_are_named_and_count_for_nothing() -> None:
    leaving = Node("b", {"CPU": 4}, {"CPU": 4}, leaves=True)
    text = lack_text(Demand({"CPU": 1}, 2), [node("a", 4, 4), leaving])
    expected = "Ray is asked for 2 x (CPU 1) on 2 nodes, and drains b; of its other 1 node, 1 node can have that"
    assert text.startswith(expected)


def test_hosts_that_share_a_node_need_its_resources_together() -> None:
    demand = Demand({"CPU": 1}, 3, strategy="STRICT_PACK")
    text = lack_text(demand, [node("a", 2, 2)])
    assert text == "Ray is asked for 3 x (CPU 1); of its 1 node, none can have all of that (the most on one: CPU 2)"
