"""Quotas of tenants: what exceeds one is refused with its name and who holds what, and nobody else notices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.slices import SliceRequest
from atoll.errors import OK, Code, Status
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from atoll.scheduling.memory_errors import _amounts
from tests.controller.play import Play, runs
from tests.controller.test_tenants import shared

MIB = 1 << 20


def playing(topology: str = "1x1x2", **settings: Any) -> Play:
    """`play.session` is bob's, who has these settings."""
    play = shared(topology, **settings)
    play.session = play.open(token="bob").number
    play.outbox()
    return play


def awaited(play: Play, handle: int) -> Status:
    """What the array is in the end, with nobody else to wait for."""
    play.say(m.Await(5, (handle,)))
    for now in (100.0, 101.0, 102.0):
        play.tick(now)
    (answer,) = [message for message in play.outbox() if isinstance(message, m.Awaited)]
    status: Status = answer.status
    return status


def closings(play: Play) -> list[tuple[tuple[str, int], Status]]:
    """Whose sessions have been ended since the last time, and why."""
    return [(to, message.status) for to, message in play.sent() if isinstance(message, m.Closing)]


# ---- sessions, slices, launches


def test_a_tenant_has_no_more_sessions_than_its_quota():
    play = shared(sessions=1)
    bob = play.open(token="bob")
    play.connect("proxy", token="bob")
    (refused, *_) = [each.message for each in play.flush() if isinstance(each, a.Send) and
                     isinstance(each.message, m.Refused)]  # fmt: skip
    assert "tenant bob has reached its quota `sessions` of 1" in refused.status.message
    play.open(token="alice")
    play.close(bob.number)
    assert play.open(token="bob").tenant.sessions == 1


@pytest.mark.parametrize(("asking", "named"), [("alice", "session 3 of tenant bob"), ("root", "session 3 (secret.py)")])
def test_who_holds_the_memory_is_named_without_what_anothers_program_is_called(asking, named):
    play = shared(device_memory=20)
    own = play.open(token=asking).number
    play.session = play.open(label="secret.py", token="bob").number
    play.array(10)
    play.session = own
    play.with_call()
    play.array(10)
    play.say(m.Launch(1, (10,), (11,), ()))
    play.say(m.Await(5, (11,)))
    for now in range(100, 200):
        play.tick(float(now))
    text = next(each.status.message for each in play.outbox() if isinstance(each, m.Awaited))
    assert named in text
    assert ("secret" in text) == (asking == "root")


def test_a_tenant_at_its_quota_of_memory_waits_and_fails_alone():
    play = shared(device_memory=100, memory=20)
    play.session = bob = play.open(token="bob").number
    play.with_call()
    play.array(10)
    (first,) = runs(play.say(m.Launch(1, (10,), (11,), ())))
    assert runs(play.say(m.Launch(1, (10,), (12,), ()))) == []
    play.session = alice = play.open(token="alice").number
    play.with_call()
    play.array(10)
    assert len([runs(play.say(m.Launch(1, (10,), (handle,), ()))) for handle in (11, 12)]) == 2
    play.proxy(bob, m.Await(5, (12,)))
    play.worker(0, m.Done(((first.sequence, 0, 1),)))
    play.outbox()
    answers = []
    for now in (100.0, 101.0, 102.0):
        play.tick(now)
        answers += [message for message in play.outbox() if isinstance(message, m.Awaited)]
    (awaited,) = answers
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED
    assert "tenant bob has 16 B of its quota `memory`, 20 B of each device" in awaited.status.message
    assert alice in play.controller.sessions


def test_a_quota_that_is_raised_lets_go_on_what_waits_for_it():
    play = shared(device_memory=100, memory=20)
    play.session = play.open(token="bob").number
    play.with_call()
    play.array(10)
    (first,) = runs(play.say(m.Launch(1, (10,), (11,), ())))
    assert runs(play.say(m.Launch(1, (10,), (12,), ()))) == []
    play.ask(play.connect("operator", token="root"), m.SetTenant("bob", limits={"memory": 0}))
    play.tick(100.0)
    assert len(runs(play.outbox())) == 1
    assert first.results == (11,)


def test_slices_have_no_more_devices_than_the_quota():
    play = shared("1x1x4", devices=3)
    play.session = play.open(token="bob").number
    play.outbox()
    (added,) = play.say(m.AddSlice(1, SliceRequest(2)))
    assert added.status.code == Code.OK
    (refused,) = play.say(m.AddSlice(2, SliceRequest(2)))
    assert "tenant bob has reached its quota `devices` of 3: its slices have 2" in refused.status.message


def test_more_launches_than_the_quota_are_errors():
    play = shared(launches=2)
    play.session = play.open(token="bob").number
    play.with_call()
    play.array(10)
    for handle in (11, 12, 13):
        play.proxy(play.session, m.Launch(1, (10,), (handle,), ()))
    started = runs(play.outbox())
    assert [run.results for run in started] == [(11,), (12,)]
    (awaited,) = play.say(m.Await(5, (13,)))
    assert "its quota `launches` of 2" in awaited.status.message
    play.done(*(run.sequence for run in started))
    assert len(runs(play.say(m.Launch(1, (10,), (14,), ())))) == 1


# ---- memory on all devices


def on_both_devices(play: Play) -> None:
    """16 bytes: one array on each of two devices."""
    play.array(10)
    play.with_put(3, device=1)
    play.report(0, m.FeedsArrived(play.session, (900,)))
    (run,) = play.say(m.Launch(3, (), (11,), (900,), context=77))
    play.done(run.sequence)


def test_a_tenant_at_its_quota_of_memory_on_all_devices_waits_and_fails_alone():
    play = playing(device_memory=100, total_memory=20)
    on_both_devices(play)
    play.with_call()
    assert runs(play.say(m.Launch(1, (10,), (12,), ()))) == [], "8 bytes more, on a device with 8 of 100"
    bob, play.session = play.session, play.open(token="alice").number
    play.with_call()
    play.array(10)
    (hers,) = runs(play.say(m.Launch(1, (10,), (11,), ())))
    play.done(hers.sequence)
    play.session = bob
    status = awaited(play, 12)
    assert status.code == Code.RESOURCE_EXHAUSTED
    assert "tenant bob has 16 B of its quota `total_memory`, 20 B" in status.message
    assert "session 2 (script.py): 8 B" in status.message


def test_what_is_released_on_another_device_counts_for_the_memory_on_all():
    play = playing(device_memory=100, total_memory=20)
    on_both_devices(play)
    play.with_call()
    assert runs(play.say(m.Launch(1, (10,), (12,), ()))) == []
    assert len(runs(play.say(m.Release((11,))))) == 1


@pytest.mark.parametrize("quota", ["memory", "total_memory"])
def test_the_error_of_a_quota_has_who_made_the_arrays_and_the_stack_of_the_request(quota):
    """From which jaxlib's client prints the lines of the user's program."""
    play = playing(device_memory=100, **{quota: 20})
    play.with_call()
    play.array(10)
    (run,) = runs(play.say(m.Launch(1, (10,), (11,), (), context=77)))
    assert runs(play.say(m.Launch(1, (10,), (12,), (), context=78))) == []
    play.done(run.sequence)
    status = awaited(play, 12)
    assert f"`{quota}`" in status.message
    report = msgspec.msgpack.decode(status.payloads[m.MEMORY_REPORT], type=m.MemoryReport)
    assert {(h.context, h.maker, h.ready, h.ready_bytes) for h in report.holders} == {(0, "put", 1, 8), (77, "f", 1, 8)}


# ---- uploads


def upload(play: Play, session: int, *feeds: int) -> list[tuple[tuple[str, int], Status]]:
    play.worker(0, m.FeedsArrived(session, feeds))
    return closings(play)


def test_more_uploads_than_the_quota_end_the_session_that_has_sent_them():
    play = playing(uploads=3)
    bob, second, alice = play.session, play.open(token="bob").number, play.open(token="alice").number
    assert upload(play, bob, 1, 2) == []
    assert upload(play, alice, *range(100)) == []
    assert upload(play, second, 3) == [], "all sessions of a tenant count"
    ((who, status),) = upload(play, second, 4)
    assert who == ("session", second)
    assert status.code == Code.RESOURCE_EXHAUSTED
    text = "tenant bob has reached its quota `uploads` of 3: 4 buffers that no launch has used yet"
    assert status.message == text
    assert {bob, alice} < set(play.controller.sessions)
    assert upload(play, bob, 5) == [], "what that session had is gone"


def test_an_upload_that_a_launch_uses_counts_no_more():
    play = playing(uploads=1)
    play.with_put()
    for number in range(5):
        assert upload(play, play.session, number) == []
        (run,) = runs(play.say(m.Launch(2, (), (10 + number,), (number,))))
        play.done(run.sequence)
    play.say(m.Launch(2, (), (20,), (50,)))
    play.say(m.Launch(2, (), (21,), (51,)))
    assert upload(play, play.session, 50, 51) == [], "awaited: none of them is early"


# ---- compilations


def register(play: Play, function: int, devices: tuple[int, ...] = (0,)) -> list[Status]:
    """Asks for a function, whose source is there; why there is none."""
    play.worker(0, m.FeedsArrived(play.session, (900 + function,)))
    said = play.say(m.RegisterFunction(function, f"content {function}", 900 + function, (devices,)))
    return [each.status for each in said if isinstance(each, m.FunctionReady)]


def test_more_functions_than_the_quota_are_not_compiled_at_a_time():
    play = playing(compiles=2)
    bob, play.session = play.session, play.open(token="bob").number
    assert register(play, 1) == []
    play.session = bob
    assert register(play, 1) == [], "the same for another session of the tenant: it waits for it, too"
    (status,) = register(play, 2)
    assert status.code == Code.RESOURCE_EXHAUSTED
    assert status.message == "tenant bob has reached its quota `compiles` of 2: these are being compiled"
    play.session = play.open(token="alice").number
    assert [register(play, number) for number in (1, 2, 3)] == [[], [], []]
    play.session = bob
    name = play.controller.sessions[bob].functions[1]
    play.worker(0, m.Compiled(name, OK, b"info", 0.1, False))
    play.outbox()
    assert register(play, 2) == []


def test_a_function_that_is_compiled_on_several_hosts_counts_once():
    play = playing("1x2x1", compiles=2)
    play.worker(1, m.FeedsArrived(play.session, (901,)))
    assert register(play, 1, (0, 1)) == []
    assert register(play, 2) == []
    assert len(register(play, 3)) == 1


# ---- texts


def test_the_error_of_a_quota_names_the_tenants_own_holdings_only():
    play = playing(device_memory=100, memory=20)
    bob = play.session
    play.session = play.open(label="other.py", token="alice").number
    play.array(10)
    play.session = bob
    play.with_call()
    play.array(10)
    (run,) = runs(play.say(m.Launch(1, (10,), (11,), ())))
    assert runs(play.say(m.Launch(1, (10,), (12,), ()))) == []
    play.done(run.sequence)
    status = awaited(play, 12)
    assert "needs 8 B, and tenant bob has 16 B of its quota `memory`, 20 B of each device" in status.message
    assert "held there by session 2 (script.py): 16 B" in status.message
    assert "alice" not in status.message


@pytest.mark.parametrize(
    ("needs", "has", "limit", "texts"),
    [
        (MIB, MIB + 4, 2 * MIB, ("1048576 B", "1048580 B", "2097152 B")),
        (MIB, 2 * MIB, 2 * MIB, ("1.0 MiB", "2.0 MiB", "2.0 MiB")),
    ],
)
def test_amounts_are_given_in_bytes_if_rounded_ones_seem_to_fit(needs, has, limit, texts):
    assert _amounts(needs, has, limit) == texts


def test_free_memory_is_given_in_bytes_if_it_seems_to_be_enough():
    assert _amounts(MIB, MIB - 4, 4 * MIB, adds_up=False) == ("1048576 B", "1048572 B", "4194304 B")
