"""Tests of the actors and placement groups that the engine creates, with a fake Ray in which the test places them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.engines.ray import ray_placement as module
from atoll.engines.ray.bundles import Demand
from atoll.engines.ray.ray_placement import RayPlacement
from tests.cluster_process import eventually

DEMAND = Demand({"CPU": 1, "GPU": 1, "rack": 1}, 2, {"zone": "a"})


class FakeActor:
    """Host actor. The test sets `end`, as Ray does when the agent has ended."""

    def __init__(self, ray: FakeRay, options: dict[str, Any]) -> None:
        self.options = options
        self.arguments: list[str] = []
        self.end: Any = None
        self.killed = False
        self.run = SimpleNamespace(remote=self._run)
        ray.actors.append(self)

    def _run(self, arguments: list[str], environment: dict[str, str], seconds: float) -> FakeActor:
        self.arguments = arguments
        return self


class FakeRay:
    """The part of the module `ray` that the engine uses. `groups` contains the placement groups by name."""

    def __init__(self) -> None:
        self.groups: dict[str, SimpleNamespace] = {}
        self.actors: list[FakeActor] = []
        self.is_shut = False
        strategy = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **given: SimpleNamespace(**given))
        self.util = SimpleNamespace(
            placement_group=self._group,
            placement_group_table=lambda group: {"state": group.state, "bundles_to_node_id": group.nodes},
            remove_placement_group=lambda group: self.groups.pop(group.name),
            scheduling_strategies=strategy,
        )
        self.draining: dict[str, int] = {}  # deadlines in ms, by node
        state = SimpleNamespace(get_draining_nodes=lambda: self.draining)
        self._private = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=dict, state=state))

    def _group(self, bundles: Any, strategy: str, name: str, bundle_label_selector: Any) -> SimpleNamespace:
        labels = bundle_label_selector
        group = SimpleNamespace(bundles=bundles, strategy=strategy, name=name, labels=labels, state="PENDING")
        group.nodes = dict.fromkeys(range(len(bundles)), "")  # as Ray reports before they are placed
        self.groups[name] = group
        return group

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda: FakeActor(self, given)))

    def wait(
        self, actors: list[FakeActor], num_returns: int, timeout: float
    ) -> tuple[list[FakeActor], list[FakeActor]]:
        ended = [each for each in actors if each.end is not None]
        return ended, [each for each in actors if each.end is None]

    def get(self, actor: FakeActor) -> Any:
        if isinstance(actor.end, Exception):
            raise actor.end
        return actor.end

    def kill(self, actor: FakeActor, no_restart: bool) -> None:
        actor.killed = True

    def nodes(self) -> list[Any]:
        return []

    def shutdown(self) -> None:
        self.is_shut = True

    @property
    def living(self) -> list[FakeActor]:
        return [each for each in self.actors if not each.killed]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(module, "connect", lambda address: fake)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_END_SECONDS", 1.0)
    monkeypatch.setattr(module, "_RETRY_SECONDS", (0.0, 0.05))
    return fake


@pytest.fixture
def leaving() -> list[tuple[int, int, float]]:
    """Return the reports about hosts on nodes that Ray drains."""
    return []


@pytest.fixture
def placement(ray: FakeRay, leaving: list[tuple[int, int, float]]) -> Iterator[RayPlacement]:
    """Return a placement of islands of two hosts with one GPU each."""
    placement = RayPlacement(
        "",
        "c",
        lambda _, island, rank: [f"{island}/{rank}"],
        {},
        10.0,
        lambda: None,
        lambda: None,
        lambda *host: leaving.append(host),
    )
    placement.start()
    yield placement
    placement.close()


def test_an_island_is_one_group_and_an_actor_for_each_host_in_its_bundle(ray: FakeRay, placement: RayPlacement) -> None:
    placement.want(3, DEMAND)
    assert eventually(lambda: len(ray.actors) == 2)
    group = ray.groups["c-island-3"]
    assert group.bundles == [{"CPU": 1, "GPU": 1, "rack": 1}] * 2
    assert group.labels == [{"zone": "a"}] * 2
    assert group.strategy == "STRICT_SPREAD"
    assert [each.arguments for each in ray.actors] == [["3/0"], ["3/1"]]
    for rank, actor in enumerate(ray.actors):
        bundle = actor.options.pop("scheduling_strategy")
        assert (bundle.placement_group, bundle.placement_group_bundle_index) == (group, rank)
        assert actor.options == {"num_cpus": 1, "num_gpus": 1, "memory": None, "resources": {"rack": 1}}
    assert eventually(lambda: "of its 0 nodes, none can have that" in placement.text(3))
    group.state = "CREATED"
    assert eventually(lambda: placement.text(3) == "Ray has placed it, and starts its host agents")


def test_an_agent_or_actor_that_has_ended_is_started_again_in_its_bundle_and_its_end_is_told(
    ray: FakeRay, placement: RayPlacement
) -> None:
    placement.want(0, DEMAND)
    assert eventually(lambda: len(ray.actors) == 2)
    ray.groups["c-island-0"].state = "CREATED"
    ray.actors[1].end = (1, "atoll: the cluster refuses this host")
    assert eventually(lambda: len(ray.actors) == 3)
    assert ray.actors[1].killed
    assert ray.actors[2].arguments == ["0/1"]
    received = "rank 1: its host agent ended with status 1: atoll: the cluster refuses this host"
    assert eventually(lambda: placement.text(0) == received)
    ray.actors[0].end = RuntimeError("the actor died\nunexpectedly")
    assert eventually(lambda: len(ray.actors) == 4)
    assert ray.actors[3].arguments == ["0/0"]
    assert eventually(lambda: "rank 0: its host actor ended: RuntimeError: the actor died" in placement.text(0))
    assert len(ray.groups) == 1


def test_a_group_that_somebody_removed_is_made_anew(ray: FakeRay, placement: RayPlacement) -> None:
    placement.want(0, DEMAND)
    assert eventually(lambda: len(ray.actors) == 2)
    removed = ray.groups["c-island-0"]
    removed.state = "REMOVED"
    assert eventually(lambda: ray.groups.get("c-island-0", removed) is not removed)
    assert eventually(lambda: len(ray.living) == 2)
    assert {each.options["scheduling_strategy"].placement_group.state for each in ray.living} == {"PENDING"}


def test_hosts_leave_a_node_that_ray_drains_and_their_island_is_placed_anew(
    ray: FakeRay, placement: RayPlacement, leaving: list[tuple[int, int, float]]
) -> None:
    placement.want(0, DEMAND)
    placement.want(1, DEMAND)
    assert eventually(lambda: len(ray.actors) == 4)
    first, second = (ray.groups[f"c-island-{island}"] for island in (0, 1))
    first.nodes, second.nodes = {0: "a", 1: "b"}, {0: "c", 1: "d"}
    ray.draining["b"] = 0
    assert eventually(lambda: leaving[2:] != [])  # repeatedly, because its agent may still connect
    assert set(leaving) == {(0, 1, math.inf)}
    ray.draining["b"] = int((time.time() + 60) * 1000)
    assert eventually(lambda: 0 < leaving[-1][2] <= 60)
    assert len(ray.actors) == 4  # they continue for as long as they do
    ray.actors[1].end = (0, "its work is done: this host agent ends")
    assert eventually(lambda: ray.groups.get("c-island-0", first) is not first)
    assert eventually(lambda: [each.arguments for each in ray.living] == [["1/0"], ["1/1"], ["0/0"], ["0/1"]])
    assert ray.groups["c-island-1"] is second


def test_an_island_that_is_over_gives_back_what_it_had_and_others_keep_theirs(
    ray: FakeRay, placement: RayPlacement
) -> None:
    placement.want(0, DEMAND)
    placement.want(1, DEMAND)
    assert eventually(lambda: len(ray.actors) == 4)
    placement.drop(0)
    assert eventually(lambda: list(ray.groups) == ["c-island-1"])
    assert [each.arguments for each in ray.living] == [["1/0"], ["1/1"]]


def test_nothing_is_left_in_ray_when_the_cluster_has_ended(ray: FakeRay, placement: RayPlacement) -> None:
    placement.want(0, DEMAND)
    assert eventually(lambda: len(ray.actors) == 2)
    placement.close()
    assert ray.living == []
    assert ray.groups == {}
    assert ray.is_shut


def test_a_lasting_failure_of_ray_is_logged_once(
    ray: FakeRay, placement: RayPlacement, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = {"away": 0, "there": 0}

    def away(_: Any) -> dict[str, float]:
        calls["away"] += 1
        raise ConnectionError("the head is away")

    def there(_: Any) -> dict[str, float]:
        calls["there"] += 1
        return {}

    for count in (1, 2):
        monkeypatch.setattr(module, "draining", away)
        before = calls["away"]
        assert eventually(lambda before=before: calls["away"] >= before + 5)
        assert len([each for each in caplog.messages if "the head is away" in each]) == count
        monkeypatch.setattr(module, "draining", there)
        before = calls["there"]
        assert eventually(lambda before=before: calls["there"] >= before + 2)
