"""Launches of large programs, which are put in line, and cleared away, over several flushes.

A launch has one queued node for each node of its program, or for a few short ones. Making 65,536 queued nodes takes
hundreds of milliseconds, so each flush does only a part of the work for one launch. There are three stages: make the
entries of the values, make the queued nodes, which are deferred, and enqueue these in order. Meanwhile, later messages
of the session wait in order.

Pure: all state is plain data, so a snapshot has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.launch.launch_builder import LaunchBuilder
from atoll.launch.scheduler import Scheduler
from atoll.protocol import messages as m
from atoll.state.dispatch_units import Unit
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun, Launch, Session
from atoll.state.session_states import SessionState
from atoll.state.stepped_work import Turns

# Launches of programs with more nodes are large.
LARGE_NODES = 256


@dataclass(eq=False)
class _Beginning:
    session: Session
    launch: Launch
    message: m.Launch
    values: int = 0  # number of values whose entries are made
    units: Sequence[Unit] | None = None
    joined: int | None = None  # number of nodes that were enqueued; None until all are made


@dataclass(eq=False)
class _End:
    launch: Launch
    values: int = 0  # number of inner values that are cleared


class LaunchSteps(Protocol):
    """The steps of a large launch that concern its whole life: those of `Launcher`."""

    def nodes_made(self, session: Session, launch: Launch, units: Sequence[Unit]) -> bool:
        """Note that all nodes of a launch are made. Return whether they join their lines now."""
        ...

    def enqueue(self, node: QueuedNode[GangRun]) -> None:
        """Have a node join its lines."""

    def lined_up(self, session: Session, launch: Launch, message: m.Launch) -> None:
        """Note that the launch of a message is in line, or has failed."""

    def clear(self, launch: Launch, values: Sequence[int], nodes: Sequence[QueuedNode[GangRun]]) -> None:
        """Free the memory of inner values, and the records of nodes, after the end of a launch."""


class LargeLaunches:
    """The large launches that are being put in line, or cleared away after their end."""

    def __init__(self, scheduler: Scheduler[GangRun], builder: LaunchBuilder, launches: LaunchSteps) -> None:
        self._scheduler, self._builder = scheduler, builder
        self._launches = launches
        self._beginning: Turns[_Beginning] = Turns()  # at most one per session
        self._ended: Turns[_End] = Turns()
        self.beginning, self.ended = self._beginning.waiting, self._ended.waiting

    def begin(self, session: Session, launch: Launch, message: m.Launch) -> None:
        """Put the launch in line over the next flushes. Later messages of the session wait until it is in line."""
        session.in_steps += 1
        for entry in launch.entries[: launch.program.arguments]:
            entry.uses += 1  # until its nodes are made
        launch.program.units.begin_launch()
        self._beginning.add(session.number, session.tenant.name, _Beginning(session, launch, message))

    def end(self, launch: Launch) -> None:
        """Clear the inner values and nodes of a launch that has ended, over the next flushes."""
        self._ended.add(launch.session, launch.nodes[0].tenant.name, _End(launch))

    def proceed(self, steps: int) -> None:
        """Do `steps` steps for one launch that begins, and for one that has ended."""
        number = self._beginning.next()
        if number is not None:
            beginning = self.beginning[number][0]
            session = beginning.session
            is_open = session.state is not SessionState.CLOSED
            if not is_open or self._proceed_beginning(beginning, steps):
                self._beginning.take(number)
                if is_open:
                    session.in_steps -= 1
                    self._launches.lined_up(session, beginning.launch, beginning.message)
        number = self._ended.next()
        if number is not None and self._proceed_end(self.ended[number][0], steps):
            self._ended.take(number)

    def _proceed_beginning(self, each: _Beginning, steps: int) -> bool:
        """Do steps for a launch that begins. Return whether it is in line, or has failed."""
        session, launch, builder = each.session, each.launch, self._builder
        if launch.error is not None:  # its nodes were dropped
            return True
        if each.values < len(launch.program.values):
            first = launch.program.arguments + each.values
            each.values = min(each.values + 2 * steps, len(launch.program.values))
            stop = launch.program.arguments + each.values
            builder.make_entries(session, launch, each.message.traceback_id, range(first, stop))
            return False
        units = launch.program.units
        if each.units is None:
            if units.form(steps):
                each.units = units.units(may_join=builder.may_join(session, launch.program))
            return False
        if each.joined is None:
            made = len(launch.nodes)
            for unit in each.units[made : made + steps]:
                builder.make_node(session, launch, unit, -1)
                self._scheduler.defer(launch.nodes[-1], own=True)
            if len(launch.nodes) == len(each.units):
                each.joined = 0
                return not self._launches.nodes_made(session, launch, each.units)
            return False
        some = launch.nodes[each.joined : each.joined + steps]
        each.joined += len(some)
        for node in some:
            if node.is_pending:
                self._launches.enqueue(node)
        return each.joined >= len(launch.nodes)

    def _proceed_end(self, each: _End, steps: int) -> bool:
        """Do steps for a launch that has ended. Return whether it is cleared."""
        launch, inner = each.launch, each.launch.program.inner_values
        values, nodes = inner[each.values : each.values + steps], launch.nodes[-steps:]
        each.values += len(values)
        del launch.nodes[-steps:]
        self._launches.clear(launch, values, nodes)
        return each.values >= len(inner) and not launch.nodes
