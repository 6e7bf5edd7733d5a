"""Tests of admission: which peers the controller accepts, and what it does when it loses one."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.controller.admission import ENGINE_SAYS_SECONDS, HELLO_SECONDS
from atoll.errors import Code
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.security.tokens import digest
from tests.controller.play import Cluster, joined, ready


def opened(cluster: Cluster, connection: int = 99) -> int:
    cluster.event(e.ConnectionOpened(0.0, connection, "a secret"))
    return connection


def refused(cluster: Cluster, connection: int) -> Any:
    """Return the reason why a connection was refused, and check that it was also closed."""
    actions = [each for each in cluster.flush() if getattr(each, "connection", -1) == connection]
    (refusal,) = [each.message for each in actions if isinstance(each, a.Send)]
    assert isinstance(actions[-1], a.Close)
    assert isinstance(refusal, m.Refused)
    return refusal.status


def hello(role: str = "operator", token: str = "", protocol: int = m.PROTOCOL) -> m.Hello:
    return m.Hello(protocol, role, digest(token), 7, "0.0", "script.py")


@pytest.mark.parametrize(
    ("first", "code", "text"),
    [
        (m.StatusRequest(), Code.FAILED_PRECONDITION, "the first message must be a Hello"),
        (hello(token="wrong"), Code.UNAUTHENTICATED, "set ATOLL_TOKEN"),
        (hello(token=""), Code.UNAUTHENTICATED, "set ATOLL_TOKEN"),
        (
            hello(token="right", protocol=1),
            Code.FAILED_PRECONDITION,
            "install the same version of atoll on both",
        ),
        (
            hello("king", "right"),
            Code.FAILED_PRECONDITION,
            "unknown role 'king': expected worker, relay, proxy",
        ),
    ],
)
def test_what_may_not_come_in_is_refused_with_what_to_do(first, code, text):
    cluster = joined("1x1x1", token="right")
    connection = opened(cluster)
    cluster.receive(connection, first)
    status = refused(cluster, connection)
    assert (status.code, text in status.message) == (code, True)
    cluster.receive(connection, hello(token="right"))
    assert cluster.flush() == [], "its later messages are ignored"


def test_a_cluster_has_one_engine_at_a_time():
    cluster = joined("1x1x1", token="right")
    second = cluster.connect("engine")
    status = refused(cluster, second)
    assert (status.code, status.message) == (Code.ALREADY_EXISTS, "this cluster has its engine")
    cluster.receive(second, m.IslandNotRestarted(0, "it says so"))
    assert not cluster.controller.resources.islands[0].is_over, "its later messages are ignored"
    cluster.receive(cluster.connect("agent"), m.AgentSays(b"for the engine"))
    assert ("engine", 0) in [to for to, message in cluster.sent() if isinstance(message, m.AgentSays)]
    cluster.event(e.ConnectionLost(0.0, cluster.engine_connection, "closed"))
    third = cluster.connect("engine")
    assert cluster.controller.connections.engine == third


def test_a_connection_that_never_says_hello_is_closed_and_no_other():
    cluster = joined("1x1x1")
    connection = opened(cluster)
    cluster.flush()
    cluster.end_timers(HELLO_SECONDS)
    closes = [each.connection for each in cluster.flush() if isinstance(each, a.Close)]
    assert closes == [connection]


def test_proxies_wait_until_the_cluster_is_complete_and_leave_without_a_session():
    cluster = Cluster("1x2x1", max_sessions=2)
    cluster.join(0)
    first, second = cluster.connect("proxy"), cluster.connect("proxy")
    third = cluster.connect("proxy")
    assert "the cluster is full: it has 2 sessions" in refused(cluster, third).message
    cluster.event(e.ConnectionLost(0.0, second, "killed"))
    assert not any(isinstance(each, a.ReportReady) for each in cluster.flush())
    cluster.join(1)
    actions = cluster.flush()
    welcomed = [each.connection for each in actions if isinstance(each, a.Send) and isinstance(each.message, m.Welcome)]
    assert welcomed == [first]
    assert isinstance(actions[-1], a.ReportReady)
    assert len(cluster.controller.sessions) == 1


def test_hosts_learn_of_one_another_once_all_are_there():
    cluster = Cluster("1x2x1")
    cluster.join(0)
    assert not any(isinstance(each, a.Send) for each in cluster.flush())
    cluster.join(1)
    peers = [each.message for each in cluster.flush() if isinstance(each, a.Send)]
    secrets = {
        host: f"secret of connection {connection}" for host, connection in cluster.controller.connections.hosts.items()
    }
    assert peers == [m.Peers(((0, "unix:/data-0", secrets[0]), (1, "unix:/data-1", secrets[1])), 10.0)] * 2


def sent(cluster: Cluster) -> list[object]:
    return [each.message for each in cluster.flush() if isinstance(each, a.Send)]


def test_a_hosts_secret_for_the_others_goes_with_its_incarnation():
    cluster = joined("2x1x1")
    cluster.lose(1, "killed")
    (left,) = [message for message in sent(cluster) if isinstance(message, m.Peers)]
    assert [host for host, _, _ in left.hosts] == [0]
    cluster.join(1, "unix:/data-1-again", 2001)
    (_, again) = [message for message in sent(cluster) if isinstance(message, m.Peers)]
    assert again.hosts[0] == left.hosts[0]
    assert again.hosts[1][2] not in {secret for _, _, secret in left.hosts}


def test_a_worker_of_an_earlier_incarnation_is_refused():
    cluster = joined("1x1x1")
    cluster.engine(m.WorkerEnded(0, 1000, -9, "killed by SIGKILL"))
    cluster.engine(m.IslandStarts(0, 2000, ("m1",)))
    cluster.flush()
    connection = cluster.connect("worker", 1999, host=0)
    cluster.receive(connection, ready(cluster.topology, 0, "unix:/thawed"))
    assert "a later incarnation of island 0 has been started" in refused(cluster, connection).message
    cluster.join(0, "unix:/data-0", 2000)
    assert cluster.controller.resources.hosts[0].machine == "m1"


def test_a_worker_may_trust_its_controller_for_as_long_as_that_one_trusts_it():
    cluster = joined("1x2x1")
    cluster.tick(1.0)
    cluster.flush()
    cluster.tick(5.0, silent=(1,))
    pings = [each.message for each in cluster.flush() if isinstance(each, a.Send)]
    assert pings == [m.Ping(7.0, 5.0), m.Ping(10.0, 5.0)]


@pytest.mark.parametrize(("host", "island"), [(0, 0), (7, 0), (1, 0)])
def test_a_host_that_is_not_expected_is_refused(host, island):
    cluster = joined("2x1x1")
    connection = cluster.connect("worker")
    cluster.flush()
    answer = ready(cluster.topology, host % 2, "unix:/x")
    cluster.receive(connection, m.WorkerReady(island, host, answer.devices, "cpu", "1", "unix:/x", 24))
    assert "is not expected" in refused(cluster, connection).message


def test_a_host_of_an_island_that_was_removed_is_refused():
    cluster = joined("2x1x1")
    cluster.engine(m.IslandNotRestarted(1, "it crashed 9 times"))
    cluster.flush()
    connection = cluster.connect("worker")
    cluster.receive(connection, ready(cluster.topology, 1, "unix:/x"))
    assert "island 1 is removed" in refused(cluster, connection).message


def test_a_lost_host_counts_a_little_later_by_when_the_engine_has_said_why():
    cluster = joined("1x1x1")
    session = cluster.open().number
    cluster.flush()
    connection = cluster.controller.connections.hosts[0]
    cluster.event(e.ConnectionLost(1.0, connection, "it closed the connection"))
    assert [type(each) for each in cluster.flush()] == [a.SetTimer]
    cluster.engine(m.WorkerEnded(0, 1000, -9, "killed by SIGKILL"))
    (lost,) = cluster.outbox()
    assert lost == m.HostsFailed((0,))
    assert "killed by SIGKILL" in cluster.controller.sessions[session].unacknowledged_failures[0][0].message
    cluster.end_timers(ENGINE_SAYS_SECONDS)
    assert cluster.outbox() == []


def test_connections_of_hosts_of_a_lost_island_are_closed():
    cluster = joined("1x2x1")
    other = cluster.controller.connections.hosts[1]
    cluster.lose(0, "killed")
    assert [each.connection for each in cluster.flush() if isinstance(each, a.Close)] == [other]
    cluster.receive(other, m.Done(((1, 0, 1),)))
    assert cluster.flush() == []


def test_hosts_are_asked_for_signs_of_life_once_a_second():
    cluster = joined("1x2x1")
    cluster.tick(1.0)
    pings = [each.message for each in cluster.flush() if isinstance(each, a.Send)]
    assert pings == [m.Ping(10.0, 1.0)] * 2


def test_a_worker_that_says_what_no_worker_says_is_lost():
    cluster = joined("1x1x1")
    cluster.worker(0, m.StopRequest())
    (closed,) = [each for each in cluster.flush() if isinstance(each, a.Close)]
    assert "a worker does not send StopRequest" in closed.reason
    assert cluster.controller.resources.has_failed(0)


def test_who_asks_to_stop_is_answered_and_workers_are_asked_to_end():
    cluster = joined("1x1x1")
    cluster.operator(m.StopRequest())
    logged, end = cluster.flush()
    assert (logged.event, type(end)) == ("operation", a.End)
    assert "by tenant default" in logged.text
    cluster.event(e.StopAsked(1.0))
    reply, left, stop, close, end = cluster.flush()
    assert (reply.message.persisted, type(left)) == ((), a.Close)
    assert (stop.message, type(close), type(end)) == (m.Stop(), a.Close, a.End)


# ---- connections that are away


def away_and_back(cluster: Cluster, connection: int) -> tuple[list[Any], list[Any]]:
    """Keep a connection away for two minutes, and then bring it back.

    Return the actions for its peer while it was away, and the messages to it afterwards.
    """
    cluster.flush()
    cluster.event(e.ConnectionAway(cluster.now, connection))
    received: list[Any] = []
    for _ in range(120):
        cluster.event(e.Tick(cluster.now + 1.0))
        cluster.now += 1.0
        received += [each for each in cluster.flush() if getattr(each, "connection", -1) == connection]
    cluster.event(e.ConnectionBack(cluster.now, connection))
    cluster.event(e.Tick(cluster.now + 1.0))
    return received, [each.message for each in cluster.flush() if getattr(each, "connection", -1) == connection]


def test_a_host_that_is_away_is_not_silent_and_gets_no_pings() -> None:
    cluster = joined("1x1x1")
    received, (ping,) = away_and_back(cluster, cluster.controller.connections.hosts[0])
    assert received == []
    assert isinstance(ping, m.Ping)
    assert ping.lease == cluster.controller.leases.seconds
    assert cluster.controller.resources.islands[0].works


def test_a_session_whose_proxy_is_away_goes_on() -> None:
    cluster = joined("1x1x1", lease_seconds=1000.0)  # long enough for the host, which does not answer in this test
    session = cluster.open()
    connection = cluster.controller.connections.sessions[session.number]
    cluster.now = 1.0
    received, (ping,) = away_and_back(cluster, connection)
    assert received == []
    assert isinstance(ping, m.Ping)
    assert session.number in cluster.controller.sessions


def test_a_host_that_is_away_and_does_not_come_back_is_lost() -> None:
    cluster = joined("1x1x1")
    connection = cluster.controller.connections.hosts[0]
    cluster.event(e.ConnectionAway(0.0, connection))
    cluster.lose(0, "it was not back within 60 s")
    assert not cluster.controller.resources.islands[0].works
    assert connection not in cluster.controller.connections.away
