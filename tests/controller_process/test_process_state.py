"""Tests that the state of a controller's process follows the events of an earlier process, without sockets or
a loop.
"""

from __future__ import annotations

from typing import Any

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.topology import Topology
from atoll.controller_process.controller_options import ControllerOptions
from atoll.controller_process.process_state import (
    MAX_EARLIER,
    MAX_SKIPPED_SECONDS,
    ContinuedClock,
    ProcessState,
    ShellDump,
    decode_shell,
    encode_shell,
    skipped_between,
)
from atoll.controller_process.shell import new_controller
from atoll.errors import JournalError
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.wire.framing import encode
from atoll.wire.resumption.retransmit_buffer import Counts
from tests.controller.play import ready

PROXY, OPERATOR, WORKER = 1, 2, 3
ROLES = {PROXY: "proxy", OPERATOR: "operator", WORKER: "worker"}
SETTINGS = ClusterSettings("1x1x1")


def state_of(dump: ShellDump | None = None) -> ProcessState:
    return ProcessState(new_controller(ControllerOptions("unix:/x", SETTINGS, 0)), dump)


def opened(number: int, role: str) -> list[e.AnyEvent]:
    hello = m.Hello(m.PROTOCOL, role, "", 1, "test", "script.py", resumes=role == "proxy")
    return [e.ConnectionOpened(1.0, number, f"{number:032x}", "", "a peer"), e.Received(1.0, number, hello)]


def scripted(state: ProcessState, *actions: a.AnyAction) -> None:
    """Replace the controller's handler, so that the next event causes these actions."""
    of_next = list(actions)

    def handle(event: e.AnyEvent) -> Any:
        decided = list(of_next)
        of_next.clear()
        return decided

    state.controller.handle = handle  # type: ignore[method-assign]


@pytest.mark.parametrize("uptime", [50.0, 5000.0])
def test_the_clock_continues_that_of_another_machine(uptime: float) -> None:
    clock = ContinuedClock(1000.0, lambda: uptime)
    assert clock.now() == 1000.0
    clock.advance_to(1003.0)
    assert clock.now() == 1003.0
    clock.advance_to(1001.0)
    assert clock.now() == 1003.0, "it never goes back"


def test_the_time_for_which_a_controller_is_stopped_does_not_count() -> None:
    uptime = 50.0
    clock = ContinuedClock(1000.0, lambda: uptime)
    for _ in range(700):
        uptime += 1.5  # a busy machine
        clock.now()
    assert clock.now() == 1000.0 + 700 * 1.5
    before, uptime = clock.now(), uptime + 700.0
    assert clock.now() == before + 1.0
    uptime += 2.0
    assert clock.now() == before + 3.0
    uptime += 700.0
    clock.advance_to(before + 500.0)  # by an event of another process
    assert clock.now() == before + 703.0, "it continues"
    assert clock.skipped == 699.0, "the stops of this process only"


def test_a_clock_that_is_read_seldom_counts_the_time_between_its_readings() -> None:
    uptime = 50.0
    clock = ContinuedClock(1000.0, lambda: uptime)
    clock.read_every(300.0)
    uptime += 700.0
    assert (clock.now(), clock.skipped) == (1700.0, 0.0)
    uptime += 1000.0
    assert (clock.now(), clock.skipped) == (2000.0, 700.0)


def reading(wall: float, uptime: float, boot: str = "a") -> e.ClockReading:
    return e.ClockReading(wall, uptime, boot)


@pytest.mark.parametrize(
    ("later", "skipped"),
    [
        ((12.0, reading(0.0, 130.0)), 28.0),  # the wall clock was set back
        ((12.0, reading(1025.0, 3.0, "b")), 23.0),  # another machine, or the same one after a restart
        ((12.0, reading(1001.0, 3.0, "b")), 0.0),  # a machine whose clock is behind
        ((12.0, reading(9e12, 3.0, "b")), MAX_SKIPPED_SECONDS),
    ],
)
def test_the_time_between_two_processes_is_that_of_the_machines_clocks(
    later: tuple[float, e.ClockReading], skipped: float
) -> None:
    assert skipped_between((10.0, reading(1000.0, 100.0)), later) == skipped


def test_the_last_reading_of_the_earlier_process_is_known() -> None:
    assert state_of().reading is None
    state = state_of(ShellDump(5.0, reading=reading(1000.0, 100.0)))
    assert state.reading == (5.0, reading(1000.0, 100.0))
    state.replay([e.Tick(6.0, reading=reading(1001.0, 101.0)), e.Tick(7.0), e.Flush(7.0)])
    assert state.reading == (6.0, reading(1001.0, 101.0))


def test_a_state_keeps_the_addresses_of_the_controllers_from_which_standbys_have_taken_over() -> None:
    state = state_of(decode_shell(encode_shell(ShellDump(earlier=("tls://one:1", "tls://two:1")))))
    state.take_over_from("tls://three:1", "tls://one:1")
    assert state.earlier == ("tls://two:1", "tls://three:1"), "this process is no earlier one"
    state.take_over_from("tls://two:1", "tls://four:1")
    assert state.earlier == ("tls://three:1", "tls://two:1")
    for number in range(MAX_EARLIER):
        state.take_over_from(f"tls://m{number}:1", "tls://own:1")
    assert state.earlier == tuple(f"tls://m{number}:1" for number in range(MAX_EARLIER))


def test_a_reading_is_that_of_the_clock_at_the_same_time() -> None:
    uptime = 50.0
    clock = ContinuedClock(1000.0, lambda: uptime)
    uptime = 52.0
    now, found = clock.reading()
    assert (now, found.uptime) == (1002.0, 52.0)
    assert found.boot


def test_a_connection_that_can_be_resumed_has_a_link_and_others_only_a_role() -> None:
    state = state_of()
    state.replay([e.Started(0.5), *opened(PROXY, "proxy"), *opened(OPERATOR, "operator"), e.Flush(1.0)])
    assert set(state.links) == {PROXY}
    assert state.links[PROXY].received == Counts(1, 0)
    assert set(state.others) == {OPERATOR}
    assert state.next == 3
    state.replay([e.ConnectionLost(2.0, PROXY, "it ended"), e.ConnectionLost(2.0, OPERATOR, "it ended"), e.Flush(2.0)])
    assert not state.links
    assert not state.others


def test_messages_are_kept_until_the_peer_has_acknowledged_them() -> None:
    state = state_of()
    state.replay(opened(PROXY, "proxy"))
    sent = state.links[PROXY].buffer.sent
    state.acknowledged(PROXY, sent)
    large, small = m.Closing(m.Status(1, "large")), m.Closing(m.Status(1, "small"))
    scripted(state, a.Send(0, PROXY, large, in_pieces=True), a.Send(0, PROXY, small), a.Send(0, OPERATOR, small))
    state.replay([e.Flush(2.0)])
    buffer = state.links[PROXY].buffer
    assert list(buffer.unacknowledged()) == [(encode(small), False), (encode(large), True)]
    state.acknowledged(PROXY, Counts(sent.whole + 1, sent.pieced))
    assert list(buffer.unacknowledged()) == [(encode(large), True)]
    state.acknowledged(OPERATOR, Counts(1, 0))


def test_a_connection_that_the_controller_closed_is_forgotten() -> None:
    state = state_of()
    state.replay([*opened(PROXY, "proxy"), *opened(OPERATOR, "operator")])
    scripted(state, a.Close(0, PROXY), a.Close(0, OPERATOR))
    state.replay([e.Flush(2.0)])
    assert not state.links
    assert not state.others


def test_timers_are_due_as_in_the_earlier_process() -> None:
    state = state_of(ShellDump(timers={1: 5.0}))
    scripted(state, a.SetTimer(0, 2, 3.0), a.SetTimer(0, 3, 1.0))
    state.replay([e.Flush(4.0), e.TimerEnded(5.0, 1), e.TimerEnded(5.0, 3)])
    assert state.timers == {2: 7.0}


def test_a_term_begins_with_the_messages_sent_until_then() -> None:
    state = state_of()
    state.replay(opened(PROXY, "proxy"))
    sent = state.links[PROXY].buffer.sent
    state.replay([e.Restarted(2.0, 7)])
    assert state.acceptor.term == 7
    assert state.links[PROXY].record().term_history == [(7, sent)]


def test_senders_in_a_turn_that_failed_are_suspects() -> None:
    state = state_of()
    joined = e.Received(1.0, WORKER, ready(Topology.parse("1x1x1"), 0, "unix:/data-0"))
    peers = [each for number, role in ROLES.items() for each in opened(number, role)]
    state.replay([e.Started(0.5), *peers, joined, e.Flush(1.0)])
    assert list(state.controller.connections.sessions.values()) == [PROXY]
    state.replay([e.Received(2.0, PROXY, m.Await(7, ())), e.Flush(2.0), e.Flush(3.0), e.Skipped(3.0, "a bug")])
    assert state.suspects == ()
    received = [e.Received(4.0, each, m.Await(8, ())) for each in (PROXY, OPERATOR)]
    state.replay([*received[:1], e.Flush(4.0), e.Skipped(4.0, "a bug")])
    assert state.suspects == (PROXY,)


def test_a_journal_that_cannot_be_replayed_is_an_error() -> None:
    state = state_of()

    def handle(event: e.AnyEvent) -> Any:
        raise ZeroDivisionError("a bug")

    state.controller.handle = handle  # type: ignore[method-assign]
    with pytest.raises(JournalError, match="cannot replay the journal: ZeroDivisionError: a bug"):
        state.replay([e.Started(1.0)])
