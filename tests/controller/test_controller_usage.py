"""Tests of usage: what the controller charges to each tenant, and the duration estimates that it keeps for programs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.tenant_settings import TenantRole, TenantSettings, token_hash
from atoll.cluster.usage.usage_records import By, Estimate, Usage
from atoll.errors import OK
from atoll.ir.program import single
from atoll.operate.log_replay import replay
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.play import Cluster, Play, runs

MS = 1_000_000


def kept(cluster: Cluster, kind: type[Any] = a.StoreUsage) -> list[Any]:
    return [action for action in cluster.flush() if isinstance(action, kind)]


def sums(cluster: Cluster) -> dict[str, Usage]:
    """Return the usage since the last call, by program."""
    return {usage.program: usage for action in kept(cluster) for usage in action.usage}


def started() -> Play:
    play = Play("1x1x2")
    play.tick(1.0)
    play.flush()
    return play


def launch(play: Play, result: int, program: int = 1, argument: int = 5) -> int:
    (run,) = runs(play.send(m.Launch(program, (argument,), (result,), ())))
    return run.sequence


def ended(play: Play, sequence: int, start: int, end: int) -> None:
    play.worker(0, m.Done(((sequence, start, end),)))


def test_a_gang_is_charged_where_it_ends_and_compiling_to_the_program():
    play = started()
    play.with_call()
    play.array(5)
    first = launch(play, 6)
    ended(play, first, 100 * MS, 350 * MS)
    second = launch(play, 7)
    ended(play, second, 200 * MS, 400 * MS)
    play.tick(2.0)
    used = sums(play)
    assert (used["f"].device_ns, used["f"].session, used["f"].label) == (300 * MS, play.session, "script.py")
    assert used["put"].bytes_moved == 8
    assert used[""].compile_seconds == 0.1, "this model of a worker names no functions"
    (action,) = [action for action in play.actions if isinstance(action, a.StoreUsage)][-1:]
    assert action.present_ns == 2_000_000_000, "of two devices"


def test_idle_and_busy_are_all_there_is_also_while_an_island_is_away():
    play = started()
    play.tick(2.0)
    play.lose(0, "it crashed")
    play.tick(3.0)
    play.tick(4.0)
    assert [action.present_ns for action in kept(play)] == [2_000_000_000]


def test_memory_is_charged_while_it_is_held():
    play = started()
    play.with_call()
    play.array(5)
    ended(play, launch(play, 6), 0, 1)
    play.flush()
    play.tick(3.0)
    used = sums(play)
    assert used["f"].byte_seconds == 16.0, "two float32 for two seconds"
    play.send(m.Release((5, 6)))
    play.tick(4.0)
    assert sums(play) == {}


def test_what_runs_long_is_charged_as_it_runs_and_no_more_in_the_end():
    play = started()
    play.with_call()
    play.array(5)
    long, behind = launch(play, 6), launch(play, 7)
    charged = []
    for second in range(2, 7):
        play.tick(float(second))
        charged.append(sums(play)["f"].device_ns)
    assert charged == [0, 0, *[1000 * MS] * 3], "only the running one of the two, after its duration is known"
    ended(play, long, 10 * MS, 5510 * MS)
    ended(play, behind, 10 * MS, 5610 * MS)
    play.tick(7.0)
    assert sums(play)["f"].device_ns == 2600 * MS


@pytest.mark.parametrize("is_lost", [False, True])
def test_charges_in_advance_are_taken_back_from_a_gang_that_waited_on_its_host_or_was_lost(is_lost: bool):
    play = started()
    play.with_call()
    play.array(5)
    sequence = launch(play, 6)
    charged = 0
    for second in range(2, 7):
        play.tick(float(second))
        charged += sums(play)["f"].device_ns
    assert charged == 3000 * MS
    if is_lost:
        play.lose(0, "it crashed")
    else:
        ended(play, sequence, 5000 * MS, 5100 * MS)
    play.tick(7.0)
    assert sums(play)["f"].device_ns == (0 if is_lost else 100 * MS) - 3000 * MS
    put, call = 1, 0 if is_lost else 100 * MS
    tallies = play.controller.launches.charges.by_island().values()
    assert sum(each.device_ns for each in tallies) == put + call


def test_what_a_session_used_is_kept_when_it_has_ended():
    play = started()
    play.with_call()
    play.array(5)
    ended(play, launch(play, 6), 10 * MS, 20 * MS)
    play.close(play.session)
    play.tick(2.0)
    assert sums(play)["f"].device_ns == 10 * MS
    play.tick(3.0)
    assert sums(play) == {}


def test_when_the_cluster_ends_all_is_kept():
    play = started()
    play.with_call()
    play.array(5)
    for i in range(3):
        ended(play, launch(play, 6 + i), (i + 1) * 10 * MS, (i + 2) * 10 * MS)
    play.now = 1.5
    play.event(e.StopAsked(1.5))
    actions = play.flush()
    (usage,) = [action for action in actions if isinstance(action, a.StoreUsage)]
    assert usage.present_ns == 1_000_000_000
    assert {each.program: each.device_ns for each in usage.usage}["f"] == 30 * MS
    (kept,) = [action for action in actions if isinstance(action, a.StoreEstimates)]
    assert [(each.nanoseconds, each.runs) for each in kept.estimates] == [(10 * MS, 3)]


def test_a_user_is_shown_its_own_usage_alone():
    tenants = (
        TenantSettings("ana", token_hash("a")),
        TenantSettings("ops", token_hash("o"), role=TenantRole.OPERATOR),
    )
    cluster = Cluster("1x1x1", tenants=tenants)
    cluster.join(0)
    asked = []
    for token in ("a", "o"):
        cluster.token = token
        connection = cluster.connect("operator")
        cluster.flush()
        cluster.receive(connection, m.UsageRequest(By.PROGRAM, 60.0))
        *_, answer = cluster.flush()
        assert isinstance(answer, a.AnswerUsage)
        assert (answer.connection, answer.by, answer.seconds) == (connection, By.PROGRAM, 60.0)
        asked.append(answer.tenant)
    assert asked == ["ana", None]


# ---- estimates


def estimates_in(play: Play) -> list[Estimate]:
    return [each for action in kept(play, a.StoreEstimates) for each in action.estimates]


def taught() -> tuple[Play, Estimate]:
    """Return a cluster whose function takes 3 ms, and the duration estimate that it has made."""
    play = started()
    play.with_call()
    play.array(5)
    for i in range(4):
        ended(play, launch(play, 6 + i), i * 3 * MS, (i + 1) * 3 * MS)
    play.tick(20.0)
    (estimate,) = estimates_in(play)
    assert estimate == Estimate("null 1x1 content 1", 3 * MS, 4)
    play.tick(40.0)
    assert estimates_in(play) == [], "no new estimates"
    return play, estimate


def gang_of(cluster: Cluster, session: int, program: int = 1) -> Any:
    registered = cluster.controller.sessions[session].programs[program]
    return registered.gangs[0]  # type: ignore[union-attr]


def register_again(cluster: Cluster, session: int, device: int = 0) -> None:
    """Register the same function for another session, on any device."""
    from atoll.ir.program import Call
    from tests.controller.play import on

    cluster.proxy(session, m.RegisterFunction(1, "content 1", 900, ((device,),)))
    cluster.worker(0, m.FeedsArrived(session, (900,)))
    name = cluster.controller.sessions[session].functions[1]
    cluster.worker(0, m.Compiled(name, OK, b"", 0.1, False))
    call = Call(1, (0,), (on(device),), (device,))
    cluster.proxy(session, m.RegisterProgram(1, single("g", (on(device),), call)))


def test_another_session_starts_with_the_estimates_also_on_other_devices():
    play, _ = taught()
    for device in (0, 1):
        session = play.open(pid=50 + device).number
        register_again(play, session, device)
        assert (gang_of(play, session).expected, gang_of(play, session).duration_estimate.runs) == (3 * MS, 4)


def test_a_gang_without_a_run_takes_the_estimate_of_others_that_do_the_same():
    play = started()
    play.with_call()
    play.array(5)
    sessions = [play.open(pid=50 + number).number for number in range(2)]
    for session in sessions:
        register_again(play, session)
    assert [gang_of(play, session).duration_estimate.runs for session in sessions] == [0, 0]
    ended(play, launch(play, 6), 0, 20 * MS)
    assert [gang_of(play, session).expected for session in sessions] == [pytest.approx(20 * MS)] * 2


def test_duration_estimates_outlive_the_program_and_the_cluster():
    play, estimate = taught()
    play.close(play.session)
    session = play.open().number
    register_again(play, session)
    assert gang_of(play, session).expected == 3 * MS

    later = Cluster("1x1x2")
    later.event(e.EstimatesRead(0.0, (estimate,)))
    later.join(0)
    session = later.open().number
    register_again(later, session)
    assert gang_of(later, session).expected == 3 * MS, "also its first run"
    later.tick(20.0)
    assert estimates_in(later) == [], "it is known already"


def test_what_takes_another_time_now_is_kept_again():
    play, _ = taught()
    for i in range(12):
        ended(play, launch(play, 20 + i), (100 + i * 9) * MS, (109 + i * 9) * MS)
    play.tick(60.0)
    (estimate,) = estimates_in(play)
    assert 8 * MS < estimate.nanoseconds <= 9 * MS


def test_what_launches_are_expected_to_take_is_part_of_the_answer():
    play, _ = taught()
    play.operator(m.UsageRequest(By.PROGRAM))
    (answer,) = kept(play, a.AnswerUsage)
    assert {(each.tenant, each.program): each.nanoseconds for each in answer.expected}["default", "f"] == 3 * MS


def test_a_log_with_estimates_replays():
    play, estimate = taught()
    play.event(e.EstimatesRead(50.0, (estimate,)))
    play.operator(m.UsageRequest())
    play.flush()
    dump = play.controller.log.dump().splitlines()
    again = [action for _, actions in replay(dump) for action in actions]
    encode = msgspec.msgpack.encode
    assert [encode(action) for action in again] == [encode(action) for action in play.actions]
