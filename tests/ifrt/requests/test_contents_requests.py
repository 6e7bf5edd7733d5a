"""Tests of arrays whose contents the client's process sends or receives."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.errors import OK, Code, Status, StatusError
from atoll.executables.program_executables import SmallWritingExecutable, WritingExecutable
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.ifrt.requests.contents_requests import put_small_contents, send_contents, write_contents
from atoll.ir.program import HostBuffer, HostToDevice
from atoll.ir.types import REPLICATED, ArraySpec, Replicated, Sharding, Tiled
from atoll.protocol import messages as m
from atoll.protocol.submission import PutArray, SmallWriting, Writing, first_feed
from tests.ifrt.rig import Rig, node_of, on


def test_a_write_is_refused_while_the_client_cannot_be_asked_for_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    relay = SimpleNamespace(has_client=False, writes=SimpleNamespace(start=lambda *write: asked.append(write)))
    monkeypatch.setattr(rig.session, "client_relay", lambda: relay)
    executable = WritingExecutable(Writing((0,), 0, PutArray("float32", (4,)), REPLICATED), rig.session.cluster)
    with pytest.raises(StatusError, match="UNAVAILABLE: the connection on which the client sends contents"):
        write_contents(rig.session, executable, [7], 0)
    assert (rig.take(), asked) == ([], [])
    relay.has_client = True
    write_contents(rig.session, executable, [8], 0)
    _, launch = rig.take_launch()
    assert asked == [(first_feed(0) + 1, launch.feeds[0], [0], 16)], "the client has counted the refused run"


@pytest.mark.parametrize("tiling", [REPLICATED, Tiled((2,), (1, 0))])
@pytest.mark.parametrize("carries", [False, True])
def test_small_contents_are_taken_from_the_slot_of_each_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, carries: bool, tiling: Replicated | Tiled
) -> None:
    welcome = msgspec.structs.replace(rig.cluster.session.welcome, most_carried=16 if carries else 0)
    rig.cluster.session.welcome = welcome
    slots = {first_feed(3) + 1: b"0123456789abcdef"}

    def take_small(write: int, nbytes: int) -> bytes:
        if write not in slots:
            raise StatusError(Code.INVALID_ARGUMENT, "no contents")
        return slots.pop(write)[:nbytes]

    monkeypatch.setattr(rig.session, "client_relay", lambda: SimpleNamespace(take_small=take_small))
    executable = SmallWritingExecutable(SmallWriting((0, 2), 3, PutArray("float32", (4,)), tiling), rig.session.cluster)
    with pytest.raises(StatusError, match="no contents"):
        put_small_contents(rig.session, executable, [7], 0)
    put_small_contents(rig.session, executable, [8], 0)
    program, launch = rig.take_launch()
    made = ArraySpec("float32", (4,), Sharding((0, 2), tiling))
    assert node_of(program) == HostToDevice((HostBuffer(0, (4,), None, None),), (made,))
    assert launch.contents == (b"0123456789abcdef" if carries else None)
    assert [(hosts, contents) for hosts, _, contents in rig.cluster.uploads] == (
        [] if carries else [((0, 1), b"0123456789abcdef")]
    )
    assert rig.session.arrays.spec(8) == made


class Relay:
    """Relay whose host sends what is ready, unless the client has no channel, and the notices to the client."""

    is_local = True

    def __init__(self) -> None:
        self.reads: list[tuple[int, ReadWanted]] = []
        self.otherwise: list[Callable[[], None]] = []
        self.unread: list[tuple[tuple[int, ...], Status]] = []

    def read_directly(self, device: int, wanted: ReadWanted, otherwise: Callable[[], None]) -> bool:
        self.reads.append((device, wanted))
        self.otherwise.append(otherwise)
        return self.is_local

    def cannot_read(self, feeds: tuple[int, ...], error: Status = OK) -> None:
        self.unread.append((feeds, error))


@pytest.fixture
def relay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Relay:
    relay = Relay()
    monkeypatch.setattr(rig.session, "client_relay", lambda: relay)
    return relay


FEED = first_feed(0)


def test_an_array_that_is_known_to_be_ready_is_requested_from_its_host(rig: Rig, relay: Relay) -> None:
    rig.make(7, on(2))
    op = rig.send("check_value_ready", values=[7])
    rig.end_waits(rig.take())
    assert rig.answer(op) is not None
    send_contents(rig.session, FEED, [7])
    assert relay.reads == [(2, ReadWanted(FEED, 7, has_ended=True))]
    assert rig.take() == []


def test_a_small_replicated_array_is_requested_from_its_first_host(rig: Rig, relay: Relay) -> None:
    rig.make(7, ArraySpec("int8", (16 << 10,), Sharding((2, 3), REPLICATED)))
    rig.session.arrays.records[7].ready = True
    send_contents(rig.session, FEED, [7])
    assert relay.reads == [(2, ReadWanted(FEED, 7, has_ended=True))]
    assert rig.take() == []


def test_a_host_that_cannot_send_the_array_has_it_read_by_a_launch(rig: Rig, relay: Relay) -> None:
    rig.make(7, on(2))
    rig.session.arrays.records[7].ready = True
    send_contents(rig.session, FEED, [7])
    relay.otherwise[0]()
    _, launch = rig.take_launch()
    assert (launch.arguments, launch.feeds, relay.unread) == ((7,), (FEED,), [])


def test_nothing_is_launched_while_devices_may_be_moving(rig: Rig, relay: Relay) -> None:
    rig.make(7, on(2))
    rig.session.arrays.records[7].ready = True
    send_contents(rig.session, FEED, [7])
    rig.receive(m.Quiesce(3))
    rig.take()
    relay.otherwise[0]()
    assert (rig.take(), relay.unread) == ([], [((FEED,), OK)])


def test_the_read_of_an_array_that_was_dropped_meanwhile_ends(rig: Rig, relay: Relay) -> None:
    rig.make(7, on(2))
    rig.session.arrays.records[7].ready = True
    send_contents(rig.session, FEED, [7])
    rig.session.arrays.remove([7])
    relay.otherwise[0]()
    ((feeds, error),) = relay.unread
    assert (feeds, error.code) == ((FEED,), Code.NOT_FOUND)
    assert rig.take() == []


def test_an_array_is_read_by_a_launch_if_its_client_cannot_receive_it(rig: Rig, relay: Relay) -> None:
    rig.make(7, on(2))
    rig.session.arrays.records[7].ready = True
    relay.is_local = False
    send_contents(rig.session, FEED, [7])
    assert rig.take_launch()[1].feeds == (FEED,)


@pytest.mark.parametrize(
    ("spec", "is_ready", "is_deleted"),
    [
        (on(2), False, False),
        (on(2), True, True),
        (on(2, shape=(4097,)), True, False),
        (on(0, 1), True, False),
    ],
    ids=["just launched", "deleted", "large", "divided"],
)
def test_other_arrays_are_read_by_a_launch(
    rig: Rig, relay: Relay, spec: ArraySpec, is_ready: bool, is_deleted: bool
) -> None:
    rig.make(7, spec)
    record = rig.session.arrays.records[7]
    record.ready, record.memory.deleted, record.made_at = is_ready, is_deleted, math.inf
    send_contents(rig.session, FEED, [7])
    assert relay.reads == []
    assert rig.take_launch()[1].arguments == (7,)


def test_an_array_that_was_launched_a_while_ago_is_requested_from_its_host(rig: Rig, relay: Relay) -> None:
    rig.make(7, on(2))
    rig.session.arrays.records[7].made_at = -math.inf
    send_contents(rig.session, FEED, [7])
    assert (relay.reads, rig.take()) == ([(2, ReadWanted(FEED, 7, has_ended=False))], [])


def test_after_an_early_read_in_vain_the_next_ones_are_launched(rig: Rig, relay: Relay) -> None:
    rig.make(7, on(2))
    rig.session.arrays.records[7].made_at = -math.inf
    send_contents(rig.session, FEED, [7])
    relay.otherwise[0]()
    assert rig.take_launch()[1].arguments == (7,)
    for _ in range(2):
        send_contents(rig.session, FEED, [7])
        (launch,) = rig.take()
        assert launch.arguments == (7,)
    send_contents(rig.session, FEED, [7])
    assert (len(relay.reads), rig.take()) == (2, [])


def test_large_contents_have_no_slot(rig: Rig) -> None:
    writing = SmallWriting((0,), 0, PutArray("float32", (16385,)), REPLICATED)
    with pytest.raises(StatusError, match="small contents have at most 65536 bytes, and these 65540"):
        SmallWritingExecutable(writing, rig.session.cluster)


@pytest.mark.parametrize(
    "tiling", [Tiled((3,), (0, 1)), Tiled((2,), (0, 0)), Tiled((2,), (0, 9)), Tiled((), (0, 1)), Tiled((1,) * 99, (0,))]
)
def test_tiles_that_do_not_fit_are_refused(rig: Rig, tiling: Tiled) -> None:
    with pytest.raises(StatusError, match="INVALID_ARGUMENT"):
        SmallWritingExecutable(SmallWriting((0, 2), 0, PutArray("float32", (4,)), tiling), rig.session.cluster)
