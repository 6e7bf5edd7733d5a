"""Tests that a loss is attributed to its first cause: a machine that left, or a link between two machines
that failed.
"""

from __future__ import annotations

import pytest

from atoll.cluster.lifecycle import IslandState
from atoll.protocol import messages as m
from atoll.telemetry.metrics import metrics_of
from tests.controller.play import Cluster, Play, joined
from tests.telemetry.reports import snapshot_of


def machines(*leaves: str) -> m.EngineReport:
    """Return an engine's report about machines m0, m1, ... that serve the hosts with the same numbers.

    `leaves` has the reason why each machine leaves, or "".
    """
    reports = (
        m.MachineReport(f"m{host}", "10.0.0.1", "", "", {}, 0, host, reason) for host, reason in enumerate(leaves)
    )
    return m.EngineReport((), tuple(reports))


def failure(cluster: Cluster) -> str:
    status = cluster.controller.resources.islands[0].last_failure
    assert status is not None
    return status.message


def test_a_machine_that_leaves_is_the_reason_though_the_connection_broke_first():
    cluster = joined("1x2x1")
    cluster.engine(machines("", "SIGTERM"))
    cluster.lose(1, "it closed the connection")
    assert failure(cluster).startswith("host 1 of island 0 is gone (m1 left: SIGTERM); ")


def test_it_is_the_reason_also_if_another_host_of_the_island_is_reported_first():
    cluster = joined("1x2x1")
    cluster.engine(machines("", "SIGTERM"))
    connections = cluster.controller.connections
    del connections.hosts[1]  # lost, but not counted yet
    cluster.engine(m.WorkerEnded(0, cluster.controller.resources.hosts[0].incarnation, -6, "killed by SIGABRT"))
    assert "host 1 of island 0 is gone (m1 left: SIGTERM)" in failure(cluster)


def test_a_host_that_fails_while_another_one_leaves_is_its_own_reason():
    cluster = joined("1x2x1")
    cluster.engine(machines("", "SIGTERM"))
    cluster.engine(m.WorkerEnded(0, cluster.controller.resources.hosts[0].incarnation, -6, "killed by SIGABRT"))
    assert "host 0 of island 0 is gone" in failure(cluster)
    assert "killed by SIGABRT" in failure(cluster)


def test_an_idle_island_that_is_the_only_one_starts_again_on_spares():
    cluster = joined("1x2x1")
    cluster.engine(m.DrainRequest(0, returns=True, has_spares=True))
    assert [each.island for each in cluster.outbox() if isinstance(each, m.EndIsland)] == [0]
    cluster.engine(m.IslandEnded(0))
    assert [each.island for each in cluster.outbox() if isinstance(each, m.StartIsland)] == [0]


@pytest.mark.parametrize(
    ("reasons", "returns", "cause"),
    [
        (("", "SIGTERM"), True, "was drained because m1 left: SIGTERM"),
        ((), True, "was drained because its machine left"),
        ((), False, "was drained by its operator"),
    ],
)
def test_the_failure_of_a_drained_island_tells_a_machine_that_left_from_an_operator(
    reasons: tuple[str, ...], returns: bool, cause: str
):
    cluster = joined("2x2x1")
    cluster.engine(machines(*reasons))
    cluster.engine(m.DrainRequest(0, returns=returns))
    assert failure(cluster) == f"island 0 {cause}"


def test_only_a_drained_island_whose_machine_left_waits_for_hosts():
    for returns in (True, False):
        play = Play("2x1x1")
        play.engine(m.DrainRequest(0, returns=returns))
        play.engine(m.IslandEnded(0))
        play.engine(m.EngineReport(((0, "waits for 1 of 1 host"),) if returns else (), ()))
        waits = next(each for each in metrics_of(snapshot_of(play)) if each.name == "atoll_island_waits_for_hosts")
        assert [sample.value for sample in waits.samples] == [float(returns), 0.0]


def test_one_with_a_session_or_without_spares_stays_and_the_refusal_is_one_event():
    cluster = joined("1x2x1")
    for _ in range(3):
        cluster.engine(m.DrainRequest(0, returns=True))
    cluster.open()
    cluster.engine(m.DrainRequest(0, returns=True, has_spares=True))
    assert cluster.controller.resources.islands[0].state is IslandState.READY
    events = [each for each in cluster.controller.history.events() if each.kind == "refused"]
    assert [each.text for each in events] == ["island 0 is the only one that is ready"]


def test_the_second_time_that_two_machines_do_not_hear_each_other_one_is_avoided():
    play = Play("1x2x1")
    avoided = []
    for start in (10, 20):
        for host in (0, 1):
            play.controller.resources.hosts[host].machine = f"m{host}"
        for now in range(start, start + 3):
            play.tick(float(now))
        play.worker(0, m.PeerSilent(1, 11.0))
        play.tick(start + 3.0)
        avoided += [each.avoid for each in play.outbox() if isinstance(each, m.RestartIsland)]
        play.join_again(0, 1)
    assert avoided == [-1, 1]
