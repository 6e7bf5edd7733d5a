"""Tests of a controller's report: counts of gangs, waits, and events."""

from __future__ import annotations

from atoll.controller.islands.engine_role import ENGINE_AWAY_SECONDS
from atoll.errors import Code, Status
from atoll.launch.gang_charges import GangCharges
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.session import MAX_ERROR
from atoll.state.tallies import BOUNDS
from atoll.telemetry.snapshot import EngineSnapshot
from tests.controller.play import BROKEN, Play, joined, runs
from tests.telemetry.reports import snapshot_of


def playing() -> Play:
    play = Play()
    play.with_call()
    play.array(10)
    return play


def test_gangs_are_counted_as_they_wait_run_and_end():
    play = playing()
    play.now = 1.0
    play.proxy(play.session, m.Launch(1, (10,), (11,), ()))
    play.proxy(play.session, m.Launch(2, (), (12,), (99,)))  # waits for its client's bytes
    (run,) = runs(play.outbox())
    (gangs,) = snapshot_of(play).gangs
    assert (gangs.island, gangs.tenant, gangs.running, gangs.waiting, gangs.ran.count) == (0, "default", 1, 1, 1)
    play.done(run.sequence)
    play.now = 3.5
    (put,) = play.report(0, m.FeedsArrived(play.session, (99,)))
    play.report(0, m.Done(((put.sequence, 5_000_000, 205_000_000),)))
    (gangs,) = snapshot_of(play).gangs
    assert (gangs.running, gangs.waiting, gangs.failed) == (0, 0, 0)
    waited = dict(zip((*BOUNDS, None), gangs.waited.counts, strict=True))
    assert {bound: count for bound, count in waited.items() if count} == {1e-5: 2, 2.5: 1}
    assert gangs.waited.seconds == 2.5
    ran = dict(zip((*BOUNDS, None), gangs.ran.counts, strict=True))
    assert {bound: count for bound, count in ran.items() if count} == {1e-5: 2, 0.25: 1}


def test_a_gang_that_fails_has_not_run():
    play = playing()
    (run,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.report(0, m.Failed(run.sequence, BROKEN))
    (gangs,) = snapshot_of(play).gangs
    assert (gangs.failed, gangs.running, gangs.ran.count) == (1, 0, 1)


def test_the_last_error_of_a_session_is_told_and_shortened():
    play = playing()
    assert snapshot_of(play).sessions[0].last_error == ""
    (run,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.report(0, m.Failed(run.sequence, Status(Code.INTERNAL, "the kernel faulted " * 100)))
    (session,) = snapshot_of(play).sessions
    assert session.last_error.startswith("the kernel faulted")
    assert len(session.last_error) == MAX_ERROR


def test_a_session_is_on_the_machine_of_its_client():
    play = Play()
    play.engine(m.EngineReport((), (m.MachineReport("m1", "10.0.0.1", "free", "", {}, 0),)))
    for address in ("user 0", "10.0.0.1", "10.0.0.2"):
        play.open(address=address)
    assert [session.machine for session in snapshot_of(play).sessions][-3:] == ["", "m1", "10.0.0.2"]


def test_the_engine_is_the_process_that_has_its_role():
    play = joined("2x1x2", engine="hosts")
    play.engine(m.EngineReport((), (m.MachineReport("m1", "10.0.0.1", "free", "", {}, 0),)))
    play.connect("spare engine", 7, address="10.0.0.1")
    assert snapshot_of(play).engine == EngineSnapshot(pid=1)
    play.event(e.ConnectionLost(play.now, play.controller.connections.engine, "closed"))
    assert snapshot_of(play).engine is None
    play.tick(1.0)
    play.tick(1.0 + ENGINE_AWAY_SECONDS + 0.1)
    assert snapshot_of(play).engine == EngineSnapshot(pid=7, machine="10.0.0.1")


def test_machines_are_shown_as_the_present_engine_knows_them():
    play = joined("2x1x2", engine="hosts")
    machine = m.MachineReport("m1", "10.0.0.1", "free", "", {}, 0)
    play.engine(m.EngineReport((), (machine,)))
    spare = play.connect("spare engine", 7)
    assert [each.state for each in snapshot_of(play).machines] == ["free"]
    play.event(e.ConnectionLost(play.now, play.controller.connections.engine, "closed"))
    assert [each.state for each in snapshot_of(play).machines] == ["unknown, because the engine is away"]
    play.tick(1.0)
    play.tick(1.0 + ENGINE_AWAY_SECONDS + 0.1)
    assert snapshot_of(play).machines == ()
    play.receive(spare, m.EngineReport((), (machine,)))
    assert [each.state for each in snapshot_of(play).machines] == ["free"]


def test_transfers_are_counted_with_their_bytes():
    play = playing()
    ((transfers,),) = [gangs.transfers for gangs in snapshot_of(play).gangs]
    assert (transfers.kind, transfers.count, transfers.bytes) == ("put", 1, 8)


def test_counts_outlive_the_session():
    play = playing()
    play.send(m.Launch(1, (10,), (11,), ()))
    play.close(play.session)
    play.flush()
    (gangs,) = snapshot_of(play).gangs
    assert (gangs.waited.count, gangs.running) == (2, 1)


def test_who_waits_for_bytes_is_told_so():
    play = playing()
    play.now = 7.0
    play.send(m.Launch(2, (), (12,), (99,)))
    (wait,) = snapshot_of(play).waits
    assert (wait.session, wait.island, wait.gangs, wait.program) == (play.session, 0, 1, "put")
    assert (wait.reason, wait.text, wait.since) == ("bytes", "bytes from its client", 7.0)


def test_who_waits_for_memory_is_told_how_much_and_where():
    play = Play("1x1x1", device_memory=16)
    play.with_call()
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))
    play.send(m.Launch(1, (10,), (12,), ()))
    (wait,) = snapshot_of(play).waits
    assert (wait.reason, wait.text) == ("memory", "8 B on device 0")


def test_who_waits_for_an_island_is_told_what_it_is():
    play = playing()
    play.with_call(3, arguments=0)
    play.lose(0, "closed")
    play.send(m.FailureAcknowledged((0,)))
    play.send(m.Launch(3, (), (51,), ()))
    (wait,) = snapshot_of(play).waits
    assert (wait.reason, wait.text) == ("island", "island 0, which is restarting")


def test_what_happened_is_told_in_order_with_its_island():
    play = playing()
    play.now = 4.0
    play.lose(0, "closed")
    play.now = 6.0
    play.join_again(0)
    events = [(event.kind, event.island, event.seconds) for event in snapshot_of(play).events]
    assert events == [("ready", 0, 0.0), ("session opened", -1, 0.0), ("failed", 0, 4.0), ("back", 0, 6.0)]
    assert "host 0 of island 0 is gone" in snapshot_of(play).events[2].text


def test_an_island_has_the_time_since_all_of_its_hosts_joined():
    play = playing()

    def seconds(now: float) -> float:
        play.now = now
        return snapshot_of(play).islands[0].working_seconds

    assert seconds(4.0) == 4.0
    play.lose(0, "closed")
    assert seconds(5.0) == 0.0
    play.join_again(0)
    assert seconds(7.5) == 2.5


def test_an_operator_ends_a_session_and_that_is_told():
    play = playing()
    play.operator(m.EndSessionRequest(play.session))
    play.flush()
    assert [event.kind for event in snapshot_of(play).events][-2:] == ["session ended", "operation"]


def test_device_time_is_summed_over_devices_by_tenant():
    play = playing()
    (run,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.report(0, m.Done(((run.sequence, 5_000_000, 205_000_000),)))
    (tenant,) = snapshot_of(play).tenants
    assert (tenant.name, tenant.role, tenant.open_sessions) == ("default", "operator", 1)
    assert round(tenant.device_seconds, 3) == 0.2


def test_tallies_are_summed_once_for_all_tenants(monkeypatch):
    play, sums, charges = playing(), [], GangCharges.by_island
    monkeypatch.setattr(GangCharges, "by_island", lambda self: sums.append(1) or charges(self))
    assert snapshot_of(play).tenants
    assert len(sums) == 1


def test_memory_of_devices_is_told_by_tenant():
    play = playing()
    (tenant,) = snapshot_of(play).tenants
    assert (tenant.bytes, tenant.device_bytes) == (8, ((0, 8),))


def test_the_load_of_the_process_comes_with_ticks():
    play = playing()
    play.event(e.Tick(1.0, e.Load(0.004, 0.5, 3, 10, 20, 100, 200)))
    load = snapshot_of(play).load
    assert (load.lag, load.cpu_seconds, load.messages_in, load.messages_out) == (0.004, 0.5, 10, 20)
    assert load.lags.count == 1
