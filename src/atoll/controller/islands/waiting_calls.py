"""Ends calls of Python that wait for a host on which the same call has failed.

The processes of a session on several hosts are one JAX program. If a function raises on one host, the processes of the
other hosts may wait for it in a collective forever, and all later calls of the session wait behind them. In JAX, the
failure of one process ends the others. Here, the processes hold objects that are worth keeping, and the other hosts may
run for a while longer and return. So the processes end only if a host has not returned `WAITING_CALL_SECONDS` after the
failure. The next call starts the processes again. Meanwhile, the host that failed starts no later call of the same
stream (`GangRun.left_out`): the other hosts would take its collectives for those in which they wait.

The time counts while no earlier call of the same stream is left on the hosts that have not returned, because such a
host has not begun the call that failed. Persistence requests need no common JAX program, so they never end in this way.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.controller.state import ClusterState
from atoll.launch.launches import Launches
from atoll.protocol import messages as m
from atoll.state.durations import Durations
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun

# For the other hosts of a call of Python to return, after it has failed on one of them.
WAITING_CALL_SECONDS = 30.0


class WaitingCalls:
    """Finds calls of Python that have failed on one host while others have not returned, and ends their processes."""

    def __init__(self, state: ClusterState, launches: Launches) -> None:
        self._outbox = state.outbox
        self._history = state.history
        self._in_flight = launches.in_flight
        self._waiting: Durations[int] = Durations()  # nodes
        self._ended: set[int] = set()  # nodes in flight whose hosts have been sent the request

    def tick(self, now: float) -> None:
        """End the processes of calls that have waited for too long. Called once per second."""
        calls = [gang for gang in self._in_flight.values() if gang.run.spec.runs_together]
        self._ended &= {gang.node.number for gang in calls}
        waiting = _waiting(calls)
        for number, seconds in self._waiting.update(now, waiting).items():
            if seconds >= WAITING_CALL_SECONDS and number not in self._ended:
                self._ended.add(number)
                self._end(*waiting[number], seconds)

    def _end(self, node: QueuedNode[GangRun], failed: Gang[GangRun], seconds: float) -> None:
        """Have all hosts of a call end their processes, so that they start again together."""
        run = failed.run
        if run.failure is not None and run.left_out:
            how = f"on host {run.left_out[0]}: {run.failure.message}"
        else:
            how = f"on island {failed.island}, before it started there"
            how += f": {run.launch.error.message}" if run.launch.error is not None else ""
        left = sorted(host for gang in node.gangs if gang.sequence in self._in_flight for host in gang.run.hosts_left)
        text = f"{run.launch.program.name} had not returned on hosts {left} {seconds:.0f} s after it had failed {how}"
        self._history.record("hangs", text, failed.island, node.session, node.tenant.name)
        for gang in node.gangs:
            stop = m.StopRun(gang.sequence, f"was ended, because {text}", run.spec.functions[0])
            self._outbox.to_hosts(gang.run.spec.hosts, stop)


def _waiting(calls: Iterable[Gang[GangRun]]) -> dict[int, tuple[QueuedNode[GangRun], Gang[GangRun]]]:
    """Return the nodes that have failed on a host and are left on others, each with a gang that has failed.

    A node is left out while a host has to return from an earlier call of the same stream.
    """
    found: dict[int, tuple[QueuedNode[GangRun], Gang[GangRun]]] = {}
    for gang in calls:
        gangs = gang.node.gangs
        failed = next((each for each in gangs if each.run.left_out and each.run.failure is not None), None)
        failed = failed or next((each for each in gangs if each.state is GangState.DROPPED), None)
        if failed is not None and gang.run.hosts_left:
            found[gang.node.number] = gang.node, failed
    if not found:
        return found
    first: dict[tuple[int, int | None, int], int] = {}  # by session, stream and host
    for gang in calls:
        number, stream = gang.node.number, gang.run.spec.stream
        for host in gang.run.hosts_left:
            key = gang.node.session, stream, host
            first[key] = min(number, first.get(key, number))
    for gang in calls:
        number, stream = gang.node.number, gang.run.spec.stream
        if any(first[gang.node.session, stream, host] < number for host in gang.run.hosts_left):
            found.pop(number, None)
    return found
