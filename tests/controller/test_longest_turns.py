"""Tests that no turn of the controller grows with what one session has: the rest follows in later turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.controller.controller_dumps import load_controller
from atoll.controller.named_arrays.published_arrays import _MAX_ADOPTED, _MAX_BEGUN
from atoll.controller.watchdog import MAX_WATCHED
from atoll.errors import OK, Code
from atoll.ir.program import Mapping, Rearrange, single
from atoll.launch import function_releases
from atoll.launch.registry import SMALL_VALUES
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.gang_states import GangState
from atoll.state.programs import RegisteredProgram
from atoll.telemetry.consistency import contradictions
from tests.controller.dumps import check_dump, dumped
from tests.controller.play import Play, chain_of, on, runs
from tests.controller.publishing_play import Trainer
from tests.work_counts import instructions_of


def longest(play: Play, *events: e.AnyEvent) -> int:
    """Return the instructions of the longest turn, from these events until no work is left."""

    def turn(event: e.AnyEvent) -> int:
        return instructions_of(lambda: play.actions.extend(play.controller.handle(event)))

    most = [turn(event) for event in events]
    most.append(turn(e.Flush(play.now)))
    while play.controller.has_work:
        most.append(turn(e.Flush(play.now)))
    return max(most)


def test_a_flush_without_work_costs_little() -> None:
    play = Play("1x1x1")

    def flush() -> int:
        return instructions_of(lambda: play.controller.handle(e.Flush(play.now)))

    flush()
    assert flush() <= 375, "it is on the path of every message of a client that waits"


def does_not_grow(work: Callable[[int], int], count: int, slack: float = 1.2) -> None:
    """Check that the longest turn with twice as many items is about the same."""
    few, many = work(count), work(2 * count)
    assert many < slack * few, f"{few} instructions with {count} items, and {many} with twice as many"


def received(play: Play, message: Any) -> e.Received:
    return e.Received(play.now, play.connection_of(play.session), message)


# ---- publishing


def with_views(count: int, **settings: Any) -> tuple[Trainer, tuple[int, ...]]:
    """The session has views of array 10 with these handles."""
    play = Trainer(**settings)
    whole = (0, 1, 1)
    views = Rearrange((0,), (on(0),) * count, tuple(Mapping(0, i, whole, whole) for i in range(count)))
    for each in play.send(m.RegisterProgram(9, single("publish", (on(0),), views))):
        if isinstance(each, m.RegisterPlan):
            play.worker(0, m.PlanRegistered(each.plan))
    handles = tuple(range(1000, 1000 + count))
    (run,) = runs(play.send(m.Launch(9, (10,), handles, ())))
    play.done(run.sequence)
    return play, handles


def publication(play: Trainer, handles: tuple[int, ...], **options: Any) -> m.Publish:
    return m.Publish(play.request(), "policy", 2, handles, tuple(map(str, handles)), **options)


COUNT = 2 * _MAX_BEGUN + _MAX_ADOPTED


@pytest.mark.parametrize("on_disk", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_version_of_many_arrays_begins_over_several_flushes(on_disk: bool) -> None:
    def work(count: int) -> int:
        play, handles = with_views(count)
        play.proxy(play.session, publication(play, handles, on_disk=on_disk))
        return longest(play)

    does_not_grow(work, COUNT)


def turns_of(play: Play, until: Callable[[], bool]) -> None:
    while not until():
        play.event(e.Flush(play.now))


def begun(play: Trainer) -> Any:
    return play.controller.published.begun[play.session][0]


@pytest.mark.parametrize("stage", ["checked", "version", "marked"])
def test_a_restored_controller_continues_to_begin_a_version(stage: str) -> None:
    play, handles = with_views(COUNT)
    play.proxy(play.session, publication(play, handles))
    play.proxy(play.session, m.Await(8, ()))
    turns_of(play, lambda: bool(play.controller.published.begun) and bool(getattr(begun(play), stage)))
    assert list(play.controller.published.names.versions()) == ([] if stage == "checked" else [begun(play).version])
    restored = check_dump(play.controller)
    sent = []
    while play.controller.has_work:
        actions = play.controller.handle(e.Flush(play.now))
        assert restored.handle(e.Flush(play.now)) == actions
        sent += [each.message for each in actions if hasattr(each, "message")]
    assert not restored.has_work
    replies = [each for each in sent if isinstance(each, (m.Published, m.Awaited))]
    assert replies == [m.Published(1, OK, 1), m.Awaited(8, OK)], "later messages of the session wait"
    assert len(play.vault.directory.entries) == COUNT
    assert play.controller.sessions[play.session].publishing == 0
    assert contradictions(play.controller) == []


def test_an_array_that_cannot_be_published_fails_a_version_of_many_arrays() -> None:
    play, handles = with_views(COUNT)
    bad = (*handles[:-1], 77)
    play.proxy(play.session, publication(play, bad))
    play.proxy(play.session, m.Await(8, ()))
    (reply, awaited) = [each for each in play.outbox() if isinstance(each, (m.Published, m.Awaited))]
    assert (reply.status.code, awaited.status) == (Code.NOT_FOUND, OK)
    entries = play.controller.sessions[play.session].directory.entries
    assert sorted(entries) == [10, handles[-1]], "the others are released"
    assert play.controller.sessions[play.session].in_steps == 0
    assert contradictions(play.controller) == []


@pytest.mark.parametrize("stage", ["checked", "version", "marked"])
def test_a_session_that_ends_while_a_version_begins_leaves_nothing(stage: str) -> None:
    play, handles = with_views(COUNT)
    play.proxy(play.session, publication(play, handles))
    turns_of(play, lambda: bool(play.controller.published.begun) and bool(getattr(begun(play), stage)))
    play.close(play.session)
    play.flush()
    assert not play.controller.published.begun
    assert list(play.controller.published.names.versions()) == []
    assert play.controller.ledger.total == 0
    assert contradictions(play.controller) == []


def test_a_version_that_is_removed_while_it_begins_fails() -> None:
    play, handles = with_views(COUNT)
    play.proxy(play.session, publication(play, handles))
    turns_of(play, lambda: bool(play.controller.published.begun) and bool(begun(play).marked))
    version = begun(play).version
    play.controller.published.remove("trainer", "policy")
    (reply,) = [each for each in play.outbox() if isinstance(each, m.Published)]
    assert reply.status == OK
    assert version.state is VersionState.FAILED
    session = play.controller.sessions[play.session]
    assert (list(session.directory.entries), session.publishing, session.in_steps) == ([10], 0, 0)


# ---- programs, and nodes in line


def instructions_to_lower(count: int) -> int:
    """Return the instructions of the longest turn of the lowering of a program with one node and many outputs."""
    play = Trainer()
    whole = (0, 1, 1)
    views = Rearrange((0,), (on(0),) * count, tuple(Mapping(0, i, whole, whole) for i in range(count)))
    most = longest(play, received(play, m.RegisterProgram(9, single("publish", (on(0),), views))))
    assert isinstance(play.controller.sessions[play.session].programs[9], RegisteredProgram)
    return most


@pytest.mark.thorough
def test_a_program_with_one_node_and_many_outputs_is_lowered_in_steps() -> None:
    in_steps, at_once = instructions_to_lower(SMALL_VALUES), instructions_to_lower(SMALL_VALUES - 2)
    assert in_steps < at_once / 2


def in_line(play: Play, count: int, sessions: int = 1) -> list[int]:
    """Open sessions with so many nodes in line each, behind some that run. Return their numbers."""
    before, opened = play.session, []
    for _ in range(sessions):
        play.session = play.open(43).number
        play.with_call()
        play.array(10)
        play.send(m.RegisterProgram(5, chain_of(10)))
        opened.append(play.session)
    for play.session in opened:
        for number in range(count // 10):
            play.send(m.Launch(5, (10,), (1000 + number,), ()))
    play.session = before
    return opened


def test_the_end_of_a_session_does_not_look_at_the_nodes_in_line_of_others() -> None:
    def work(count: int) -> int:
        play = Play()
        in_line(play, count)
        return longest(play, e.ConnectionLost(play.now, play.connection_of(play.session), "closed"))

    does_not_grow(work, 200, slack=1.05)


def test_the_nodes_of_a_session_are_found_in_the_order_of_all_nodes() -> None:
    play = Play()
    sessions = in_line(play, 40, sessions=2)
    scheduler = play.controller.scheduler
    assert len(scheduler.all_nodes()) > 40
    for some in (sessions, sessions[:1], sessions[1:]):
        assert scheduler.nodes_of(some) == [each for each in scheduler.all_nodes() if each.session in some]
    committed = [each for each in scheduler.all_nodes() if any(g.state is GangState.COMMITTED for g in each.gangs)]
    assert scheduler.committed_nodes() == committed


def test_the_loss_of_an_island_does_not_look_at_the_nodes_of_sessions_without_errors_elsewhere() -> None:
    def work(count: int) -> int:
        play = Play("2x1x1")
        in_line(play, count)
        longest(play, e.ConnectionLost(play.now, play._hosts[1], "its connection broke"))
        timer = max(each.timer for each in play.actions if isinstance(each, a.SetTimer))
        most = longest(play, e.TimerEnded(play.now, timer))
        assert not play.controller.resources.islands[1].works
        return most

    does_not_grow(work, 200, slack=1.1)


# ---- functions

BUSY = TenantSettings("busy", token_hash("busy"))
LIMITED = TenantSettings("limited", token_hash("limited"), compiles=100)


def registered(play: Play, count: int, first: int = 1) -> None:
    """Register functions that are being compiled."""
    for number in range(first, first + count):
        play.proxy(play.session, m.RegisterFunction(number, f"content {number}", 900 + number, ((0,),)))
        play.flush()


def test_a_quota_of_compilations_is_checked_without_looking_at_those_of_others() -> None:
    def work(count: int) -> int:
        play = Play(token="cluster", tenants=(BUSY, LIMITED))
        play.session = play.open(token="busy").number
        registered(play, count)
        play.session = play.open(token="limited").number
        registered(play, 3)
        play.flush()
        return longest(play, received(play, m.RegisterFunction(99, "content", 999, ((0,),))))

    does_not_grow(work, 50, slack=1.1)


def test_functions_that_are_compiled_on_several_hosts_count_once_for_the_quota() -> None:
    settings = TenantSettings("limited", token_hash("limited"), compiles=2)
    play = Play("1x2x1", token="cluster", tenants=(settings,))
    play.session = play.open(token="limited").number
    for number in (1, 2):
        assert not closings_of(play.send(m.RegisterFunction(number, f"content {number}", 900 + number, ((0, 1),))))
    (refused,) = closings_of(play.send(m.RegisterFunction(3, "content 3", 903, ((0, 1),))))
    assert refused.status.code == Code.RESOURCE_EXHAUSTED
    name = play.controller.sessions[play.session].functions[1]
    for host in (0, 1):
        play.report(host, m.Compiled(name, OK, b"", 0.1, False))
        dumped_pending = load_controller(dumped(play.controller)).functions.compiling(play.session)
        assert play.controller.functions.compiling(play.session) == dumped_pending == (2 if host == 0 else 1)
    assert not closings_of(play.send(m.RegisterFunction(3, "content 3", 903, ((0, 1),))))


def closings_of(messages: list[Any]) -> list[m.FunctionReady]:
    return [each for each in messages if isinstance(each, m.FunctionReady) and not each.status.ok]


def test_the_watchdog_describes_few_compilations_of_a_session() -> None:
    play = Play(dumps=False)
    registered(play, 2 * MAX_WATCHED)
    owed = [subject for subject, _ in play.controller.watchdog.owed(play.now)]
    assert [each.session for each in owed] == [play.session] * MAX_WATCHED


def compiled(play: Play, count: int) -> None:
    """Register functions, and let their host compile them."""
    registered(play, count)
    for number in range(1, count + 1):
        play.worker(0, m.FeedsArrived(play.session, (900 + number,)))
        name = play.controller.sessions[play.session].functions[number]
        play.report(0, m.Compiled(name, OK, b"", 0.1, False))
    play.now = 100.0
    play.tick(play.now)  # the controller does not ask about them any more
    play.flush()


def test_the_loss_and_the_restart_of_an_island_do_not_look_at_each_function() -> None:
    def work(count: int) -> tuple[int, int]:
        play = Play("2x1x1")
        compiled(play, count)
        loss = instructions_of(lambda: play.lose(0, "its connection broke"))
        restart = instructions_of(lambda: play.join(0, "unix:/data-0-again", 2000))
        session = play.controller.sessions[play.session]
        assert play.controller.resources.islands[0].needs_recompile == {session.number: set(session.function_uses)}
        return loss, restart

    work(10)  # what is done once, such as imports
    few, many = work(50), work(150)
    assert all(more < less + 50 for less, more in zip(few, many, strict=True)), f"{few} and {many} instructions"


def test_functions_of_several_islands_are_compiled_again_when_all_of_them_work() -> None:
    play = Play("2x1x1")
    session = play.controller.sessions[play.session]
    for number, devices in ((1, (0,)), (2, (1,)), (3, (0, 1))):
        message = m.RegisterFunction(number, f"content {number}", 900 + number, (devices,), runs_apart=True)
        play.proxy(play.session, message)
    play.flush()
    for number in (1, 2, 3):
        for host in (0, 1):
            play.worker(host, m.FeedsArrived(play.session, (900 + number,)))
            play.report(host, m.Compiled(session.functions[number], OK, b"", 0.1, False, is_apart=number == 3))
    play.lose(0, "its connection broke")
    play.lose(1, "its connection broke")
    play.join_again(0)
    islands, names = play.controller.resources.islands, session.functions
    assert islands[0].needs_recompile == {play.session: {names[1]}}
    play.join_again(1)
    assert islands[1].needs_recompile == {play.session: {names[2], names[3]}}
    play.lose(0, "its connection broke")
    assert islands[1].needs_recompile == {play.session: {names[2]}}
    restored = load_controller(dumped(play.controller)).sessions[play.session]
    assert restored.functions_on == session.functions_on == {(0,): {names[1]}, (1,): {names[2]}, (0, 1): {names[3]}}
    play.send(m.ReleaseFunction(3))
    assert session.functions_on == {(0,): {names[1]}, (1,): {names[2]}}


def with_late_releases(count: int) -> Play:
    """The session has released functions while a gang that calls Python waits for its start."""
    play = Play()
    compiled(play, count)
    play.controller.sessions[play.session].python_gangs.add(10**6)
    for number in range(1, count + 1):
        play.proxy(play.session, m.ReleaseFunction(number))
    play.flush()
    assert len(play.controller.sessions[play.session].deferred_releases) == count
    play.controller.sessions[play.session].python_gangs.clear()
    return play


def test_releases_that_have_waited_for_a_gang_are_done_over_several_flushes() -> None:
    count = 2 * function_releases._MAX_RELEASED
    does_not_grow(lambda some: longest(with_late_releases(some)), count)
    play = with_late_releases(count)
    play.event(e.Flush(play.now))
    assert play.controller.has_work
    check_dump(play.controller)
    play.flush()
    assert play.controller.functions.users == {}
    assert not play.controller.has_work
