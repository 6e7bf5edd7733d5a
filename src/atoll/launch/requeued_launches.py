"""Put launches in line again that were sent to an island that failed, and that had not started there.

`failures` decides which launches survive, by the rules of `survivors`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Launch


class RequeuedLaunches:
    """Withdraws launches from hosts that failed, and enqueues them again.

    `in_flight` has the gangs in flight, by sequence. Gangs of withdrawn launches are removed from it.
    """

    def __init__(self, shared: SharedState, parts: SharedParts) -> None:
        self._sessions = shared.sessions
        self._scheduler = parts.scheduler
        self._sequential = parts.sequential
        self._builder = parts.builder
        self._reservations = parts.reservations
        self._buffers = parts.buffers
        self._charges = parts.charges
        self._in_flight = parts.in_flight

    def requeue(self, launches: Sequence[Launch]) -> None:
        """Put launches in line again that were sent to hosts that failed, and that had not started there.

        The memory of all launches is released before the first one is enqueued, since later launches may have inherited
        memory from earlier ones.
        """
        ages = [min(node.age for node in launch.nodes) for launch in launches]
        unsent = [self._withdraw(launch) for launch in launches]
        for launch in launches:
            for entry in launch.entries[launch.program.arguments :]:
                self._reservations.release(entry)
        for launch, age, gangs in zip(launches, ages, unsent, strict=True):
            session = self._sessions[launch.session]
            for handle, entry in launch.named_entries():
                if handle not in session.directory.entries:  # it was released, and freed when the last use had started
                    session.directory.add(handle, entry)
            self._builder.make_nodes(session, launch, age)
            for gang in gangs:
                launch.program.waiting -= 1
                self._buffers.drop_uses(session, gang)
        nodes = [node for launch in launches for node in launch.nodes]
        if self._sequential is not None:
            self._sequential.precede(nodes)
        for node in nodes:
            self._scheduler.enqueue(node)

    def _withdraw(self, launch: Launch) -> list[Gang[GangRun]]:
        """Withdraw a launch that was sent to hosts that failed, as if none of it had started.

        Return the gangs that had not been sent: they still count as waiting, and as users of their buffers.
        """
        gangs = [gang for node in launch.nodes for gang in node.gangs]
        self._reservations.dropped(self._scheduler.drop_all(launch.nodes))
        if self._sequential is not None:
            for node in launch.nodes:
                self._sequential.withdraw(node)
        for gang in gangs:
            if gang.state is GangState.RUNNING:
                gang.enter(GangState.FAILED)
                del self._in_flight[gang.sequence]
                self._charges.withdrawn(gang)
                self._scheduler.finished(gang)
                self._reservations.ended(gang)
        for node in launch.nodes:
            node.end()
        launch.nodes, launch.pending = [], 0
        launch.hosts_started.clear()
        return [gang for gang in gangs if gang.state is GangState.DROPPED]
