"""Tests of islands that differ in hosts, devices, platform and device kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.lifecycle import IslandState
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.topology import IslandShape
from atoll.errors import Code, StatusError
from atoll.protocol import messages as m
from atoll.state.queued_nodes import NOBODY
from atoll.state.session import Session
from atoll.telemetry.report import report
from tests.controller.play import Play, joined

LARGE, SMALL = IslandShape(2, 2, "cpu", (2, 2)), IslandShape(1, 3, "cpu", (), "tpu")
NULL = IslandShape(1, 1, "null", (), "slow")


def play_on(*shapes: IslandShape, **settings: Any) -> Play:
    return Play("1x1x1", shapes=shapes, **settings)


def opened(play: Play) -> Session:
    return play.controller.sessions[play.session]


def test_a_session_has_the_devices_of_all_islands_with_their_meshes() -> None:
    devices = opened(play_on(LARGE, SMALL)).devices.virtual
    assert [(each.island, each.host) for each in devices] == [(0, 0)] * 2 + [(0, 1)] * 2 + [(1, 2)] * 3
    assert [each.info.coords for each in devices[:4]] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_devices_are_numbered_through_the_cluster() -> None:
    islands = report(play_on(LARGE, SMALL).controller).islands
    numbers = [[device.id for host in island.hosts for device in host.devices] for island in islands]
    assert numbers == [[0, 1, 2, 3], [4, 5, 6]]
    assert [island.mesh for island in islands] == [(2, 2), (3,)]
    assert islands[1].shape == IslandShape(1, 3, "cpu", kind="tpu")


@pytest.mark.parametrize(
    ("shapes", "accelerator", "island"),
    [
        ((LARGE, SMALL), "", 1),  # the more compact of the two
        ((LARGE, SMALL), "tpu", 1),
        ((LARGE, SMALL), "gpu", None),
        ((LARGE, LARGE), "tpu", 0),  # there are no types there: this is only a name
    ],
)
def test_a_slice_is_of_the_type_that_is_asked_for_where_there_are_types(
    shapes: tuple[IslandShape, ...], accelerator: str, island: int | None
) -> None:
    play = play_on(*shapes)
    (added,) = play.send(m.AddSlice(1, SliceRequest(2, accelerator=accelerator)))
    if island is None:
        assert added.status.code == Code.RESOURCE_EXHAUSTED
        assert "it has no gpu devices" in added.status.message
    else:
        assert {opened(play).devices.locations[device].island for device in added.devices} == {island}


def test_a_session_has_devices_of_one_platform() -> None:
    play = play_on(LARGE, NULL)
    assert {each.island for each in opened(play).devices.virtual} == {0}
    (added,) = play.send(m.AddSlice(1, SliceRequest(1, kind="slow")))
    assert "its devices are null, and this session has cpu devices" in added.status.message
    other = play.controller._sessions.open(99, "secret", 7, "other.py", NOBODY, "null")
    assert {each.island for each in other.devices.virtual} == {1}
    with pytest.raises(StatusError, match="has no tpu devices: its islands have cpu, null devices"):
        play.controller._sessions.open(100, "secret", 7, "third.py", NOBODY, "tpu")


def test_a_new_island_is_like_one_of_the_others_or_of_a_shape_of_its_own() -> None:
    play = play_on(LARGE, SMALL)
    play.operator(m.AddIslandRequest())
    (refused,) = play.outbox()
    assert (
        "with --like, or name a shape with --shape: island 0 has 2 hosts with 2 cpu devices each"
        in refused.status.message
    )
    play.operator(m.AddIslandRequest(like=1))
    assert play.outbox() == [m.StartIsland(2, SMALL)]
    own = IslandShape(1, 2, "cpu")
    play.operator(m.AddIslandRequest(own))
    assert play.outbox() == [m.StartIsland(3, own)]
    play.operator(m.AddIslandRequest(like=9))
    (refused,) = play.outbox()
    assert "island 9 does not exist" in refused.status.message
    play.operator(m.AddIslandRequest(msgspec.structs.replace(own, devices=0)))
    (refused,) = play.outbox()
    assert refused.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(("asked", "seconds"), [(0.0, 50.0), (20.0, 20.0)])
def test_a_new_island_is_removed_after_the_time_that_was_asked_for(asked: float, seconds: float) -> None:
    play = Play("1x1x1", wait_seconds=50.0)
    play.operator(m.AddIslandRequest(wait_seconds=asked))
    play.tick(1.0)
    play.tick(1.0 + seconds)
    assert not [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    play.tick(2.0 + seconds)
    (reply,) = [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    assert f"it was not up within {seconds:.0f} s" in reply.status.message


def test_an_island_that_was_drained_since_a_machine_left_comes_back_with_the_machine() -> None:
    play = joined("2x1x2")
    play.engine(m.DrainRequest(1, returns=True))
    assert m.EndIsland(1) in play.outbox()
    play.engine(m.IslandEnded(1))
    assert m.StartIsland(1) in play.outbox()  # as long as the engine looks for machines
    island = play.controller.resources.islands[1]
    play.tick(10_000.0)
    assert island.state is IslandState.DRAINED
    assert {each.island for each in play.open(50, "while.py").devices.virtual} == {0}
    play.engine(m.IslandStarts(1, 5, ("m9",)))
    assert island.state is IslandState.RESTARTING
    play.outbox()
    play.join(1, pid=5)
    assert m.HostsRestarted(((1, "unix:/data-1"),)) in play.outbox()  # the session that has opened since then
    assert island.state is IslandState.READY
    assert {each.island for each in play.open(51, "later.py").devices.virtual} == {0, 1}


def undrain(play: Play, island: int) -> m.OperationReply:
    play.outbox()
    play.operator(m.UndrainRequest(island))
    (reply,) = [each for each in play.outbox() if isinstance(each, m.OperationReply)]
    return reply


def test_a_drained_island_starts_again_if_its_operator_asks_for_it() -> None:
    play = joined("2x1x2")
    play.operator(m.DrainRequest(1))
    assert "are ending" in undrain(play, 1).status.message
    play.engine(m.IslandEnded(1))
    play.outbox()
    play.operator(m.UndrainRequest(1))
    assert m.StartIsland(1) in play.outbox()
    assert "starts again when machines are available" in undrain(play, 1).status.message
    play.engine(m.IslandStarts(1, 5, ("m1",)))
    play.join(1, pid=5)
    assert play.controller.resources.islands[1].state is IslandState.READY
    assert {each.island for each in play.open(51, "later.py").devices.virtual} == {0, 1}


def test_only_a_drained_island_can_be_undrained() -> None:
    play = joined("2x1x2")
    assert "island 1 is ready: only a drained island can be undrained" in undrain(play, 1).status.message
    assert undrain(play, 7).status.code == Code.NOT_FOUND


def test_an_island_that_its_operator_has_drained_stays_drained() -> None:
    play = joined("2x1x2")
    play.operator(m.DrainRequest(1))
    play.engine(m.IslandEnded(1))
    assert m.StartIsland(1) not in play.outbox()
    play.engine(m.IslandStarts(1, 5, ("m9",)))
    assert play.controller.resources.islands[1].state is IslandState.DRAINED
