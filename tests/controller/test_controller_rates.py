"""Tests of limits per second: launches, compile seconds and uploads beyond a tenant's limit are delayed, not
refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import OK
from atoll.ir.program import HostBuffer, HostToDevice, single
from atoll.protocol import messages as m
from atoll.state.gang_states import Reason
from atoll.state.rates import BURST_SECONDS, COMPILE_BURST_MINUTES
from atoll.state.session import Session
from tests.controller.play import Play, on, runs
from tests.controller.test_crashes import compilation, launch
from tests.controller.test_tenants import shared, status

RATE = 2


def beside_another(**limits: Any) -> tuple[Play, Session]:
    """Return a session of bob with these limits, and a session of alice without limits."""
    play = shared("1x1x2", **limits)
    bob = play.open(token="bob")
    play.open(token="alice")
    play.outbox()
    return play, bob


def test_launches_beyond_the_rate_wait_in_line_and_run_later():
    play, bob = beside_another(launch_rate=RATE)
    (first,) = launch(play, bob, 100)
    play.done(first.sequence)
    sent = 1
    burst = int(RATE * BURST_SECONDS)
    for handle in range(burst + 4):
        play.proxy(bob.number, m.Launch(100, (), (2000 + handle,), ()))
        for run in runs(play.outbox()):
            play.done(run.sequence)
            sent += 1
    assert sent == burst + 1, "the last one has exceeded the limit"
    (wait,) = play.controller.scheduler.waits()[0]
    assert (wait.session, wait.gangs, wait.reason) == (bob.number, 5 - 1, Reason.RATE)
    assert any("limit of launches" in each["text"] for each in status(play, "bob")["waits"])
    later = []
    for now in range(1, 5):
        play.tick(float(now))
        found = runs(play.outbox())
        later.append(len(found))
        play.done(*[each.sequence for each in found])
    assert sum(later) == 4
    assert max(later) <= RATE + 1


def test_nothing_is_delayed_while_nobody_else_is_there():
    play = shared("1x1x2", launch_rate=RATE)
    bob = play.open(token="bob")
    play.close(play.session)
    play.outbox()
    assert len(launch(play, bob, 100)) == 1
    for handle in range(int(RATE * BURST_SECONDS) + 4):
        play.proxy(bob.number, m.Launch(100, (), (2000 + handle,), ()))
    found, count = runs(play.outbox()), 0
    while found:
        count += len(found)
        found = runs(play.done(*[each.sequence for each in found]))
    assert play.controller.scheduler.waits() == {}
    assert count == int(RATE * BURST_SECONDS) + 4


def test_a_raised_limit_counts_at_once():
    play, bob = beside_another(launch_rate=RATE)
    (run,) = launch(play, bob, 100)
    play.done(run.sequence)
    for handle in range(int(RATE * BURST_SECONDS) + 4):
        play.proxy(bob.number, m.Launch(100, (), (2000 + handle,), ()))
        play.done(*[each.sequence for each in runs(play.outbox())])
    play.ask(play.connect("operator", token="root"), m.SetTenant("bob", limits={"launch_rate": 0}))
    assert play.controller.tenants.by_name["bob"].settings.launch_rate == 0
    play.proxy(bob.number, m.Launch(100, (), (3000,), ()))
    assert len(runs(play.outbox())) == 5


def test_a_session_that_ends_takes_its_delayed_launches_along():
    play, bob = beside_another(launch_rate=RATE)
    (run,) = launch(play, bob, 100)
    play.done(run.sequence)
    for handle in range(int(RATE * BURST_SECONDS) + 4):
        play.proxy(bob.number, m.Launch(100, (), (2000 + handle,), ()))
        play.done(*[each.sequence for each in runs(play.outbox())])
    play.close(bob.number)
    play.tick(5.0)
    assert runs(play.outbox()) == []
    assert play.controller.scheduler.waits() == {}


def test_after_a_long_compilation_the_next_one_waits():
    play, bob = beside_another(compile_seconds=60)
    (compile_,) = [each for each in compilation(play, bob, 100) if isinstance(each, m.Compile)]
    play.report(0, m.Compiled(compile_.function, OK, b"", COMPILE_BURST_MINUTES * 60 + 3, False, 0))
    assert compilation(play, bob, 101) == []
    play.tick(2.0)
    assert play.outbox() == []
    play.tick(4.0)
    assert [type(each) for each in play.outbox()] == [m.Compile]


def test_uploads_are_counted_and_no_launch_is_lost():
    play, bob = beside_another(upload_rate=1)
    body = single("put", (), HostToDevice((HostBuffer(0, (100,), None, None),), (on(0),)), feeds=1)
    play.proxy(bob.number, m.RegisterProgram(7, body))
    for feed in range(3):
        play.proxy(bob.number, m.Launch(7, (), (50 + feed,), (feed,)))
        play.worker(0, m.FeedsArrived(bob.number, (feed,)))
    found = runs(play.outbox())
    rates = play.controller._state.rates.of(bob.tenant)
    assert rates is not None
    assert rates.uploads.level < BURST_SECONDS
    assert len(found) + len(rates.delayed) == 3


def test_compilation_on_cpus_is_charged_as_device_time():
    play, bob = beside_another()
    charged: list[int] = []
    policy = play.controller.scheduler.policy_of(0)

    def compiled(session: int, tenant: object, nanoseconds: int) -> None:
        charged.append(nanoseconds)

    policy.compiled = compiled  # type: ignore[method-assign]
    (compile_,) = [each for each in compilation(play, bob, 100) if isinstance(each, m.Compile)]
    play.report(0, m.Compiled(compile_.function, OK, b"", 2.0, False, 0))
    assert charged == [2_000_000_000]


def test_what_a_tenant_may_not_be_set_to_is_said_in_words():
    play = shared()
    root = play.connect("operator", token="root")
    for message, text in (
        (m.SetTenant("bob", share=-1.0), "the share of tenant bob cannot be -1"),
        (m.SetTenant("bob", priority=10**9), "the priority of tenant bob cannot be 1000000000"),
        (m.SetTenant("bob", limits={"reserve": 51}), "the reserve of tenant bob cannot be 51"),
        (m.SetTenant("bob", limits={"launches": -1}), "the limit `launches` of tenant bob cannot be -1"),
    ):
        (reply,) = play.ask(root, message)
        assert text in reply.status.message
        assert "$" not in reply.status.message


def test_setting_a_priority_says_what_it_means_for_others():
    play = shared()
    root = play.connect("operator", token="root")
    (reply,) = play.ask(root, m.SetTenant("bob", priority=1))
    assert "while bob has work, these tenants get no device time beyond their reserve" in reply.text
    assert "alice" in reply.text
    (reply,) = play.ask(root, m.SetTenant("alice", share=3.0))
    assert "warning" not in reply.text
    (reply,) = play.ask(root, m.SetTenant("alice", priority=0))
    assert "alice gets no device time beyond its reserve of 0 percent while one of these has work: bob" in reply.text


def test_defaults_do_not_delay_an_honest_program():
    settings = shared().controller.tenants.by_name["bob"].settings
    assert (settings.launch_rate, settings.compile_seconds, settings.upload_rate) == (2000, 60, 1 << 30)
    assert msgspec.structs.asdict(settings)["launches"] == 0
