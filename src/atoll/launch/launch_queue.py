"""Put launches in line: their nodes join the lines of their islands at once, or are deferred or delayed.

A launch is deferred until the launches that it depends on have made progress (`dependency_tracker`), and delayed if its
tenant launches too often (`state.rates`).

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.launch.launch_ends import LaunchEnds
from atoll.launch.shared_parts import SharedParts
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.dispatch_units import Unit
from atoll.state.gang_states import Reason
from atoll.state.session import Launch, Session


class LaunchQueue:
    """Puts launches in line.

    `lines` is the scheduler, or sequential dispatch in front of it.
    """

    def __init__(self, shared: SharedState, parts: SharedParts, *, ends: LaunchEnds) -> None:
        self._outbox = shared.outbox
        self._rates = shared.rates
        self._services = parts.services
        self._scheduler, self._lines = parts.scheduler, parts.lines
        self._builder = parts.builder
        self._dependencies = parts.dependencies
        self._ends = ends

    def restore_spilled(self, session: Session, message: m.Launch) -> None:
        """Make the spilled arguments of a launch available. Call this before the launch is made."""
        if session.has_spilled:
            entries = session.directory.entries
            arguments = dict.fromkeys(message.arguments)  # one array may be there several times
            spilled = [each for each in arguments if entries[each].spilled is not None]
            self._services.restore_spilled(session, spilled)

    def line_up(self, session: Session, launch: Launch, age: int = -1) -> None:
        """Make the nodes of the launch, and enqueue them, or defer them until they may join their lines."""
        units = self._builder.make_nodes(session, launch, age)
        if not launch.pending:
            self._ends.end(launch)
            return
        if launch.dependency is None:
            self.order_by_dependencies(launch, units)
        if launch.dependency is None:
            for node in launch.nodes:
                self._lines.enqueue(node)

    def order_by_dependencies(self, launch: Launch, units: Sequence[Unit]) -> None:
        """Give a launch a dependency if it must not join its lines before others have made progress."""
        program, entries = launch.program, launch.entries
        if not program.is_unbounded and not self._dependencies.has_some(launch.session):
            return
        donated = [entries[i] for i in program.donated]
        launch.dependency = self._dependencies.order(launch.nodes, units, entries[: program.arguments], donated)
        if launch.dependency is not None:
            for entry in entries[program.arguments :]:
                entry.dependency = launch.dependency

    def limit_rate(self, session: Session, launch: Launch) -> None:
        """Delay a launch in line if its tenant has launched too many within a second."""
        if not self._rates.charge_launch(session.tenant, launch, self._outbox.seconds):
            self._scheduler.lacks(launch.nodes[0], Reason.RATE)

    def release_delayed(self) -> None:
        """Make the launches ready that were delayed by the limits of their tenants, and that are due."""
        if self._rates.delayed:
            for node in self._rates.due(self._outbox.seconds):
                self._scheduler.arrived(node, Reason.RATE)
