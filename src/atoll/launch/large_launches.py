"""The large launches that are being put in line, and the nodes of those that have ended, which are cleared in steps.

A launch has one queued node for each node of its program, or for a few short ones. Making 65,536 queued nodes takes
hundreds of milliseconds, so each flush does only a part of the work for one launch: `large_launch_steps` puts launches
in line, and `LargeLaunches.clear_ended` frees what they leave. Meanwhile, later messages of the session wait in order.

Pure: all state is plain data, so a snapshot has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.launch.reservations import Reservations
from atoll.protocol import messages as m
from atoll.state.buffer_directory import NO_ENTRY
from atoll.state.dispatch_units import Unit
from atoll.state.session import Launch, Session
from atoll.state.stepped_work import Discards, Turns

# Launches of programs with more nodes are large.
LARGE_NODES = 256


class LargeLaunch(msgspec.Struct, eq=False):
    """A launch that is being put in line."""

    session: Session
    launch: Launch
    message: m.Launch
    values: int = 0  # number of values whose entries are made
    units: Sequence[Unit] | None = None
    joined: int | None = None  # number of nodes that were enqueued; None until all are made


class EndedLaunch(msgspec.Struct, eq=False):
    """A launch that has ended, and is being cleared."""

    launch: Launch
    values: int = 0  # number of inner values that are cleared


class LargeLaunches:
    """The large launches that are being put in line, or cleared away after their end. Sessions take turns."""

    def __init__(self, reservations: Reservations, discards: Discards) -> None:
        self._reservations, self._discards = reservations, discards
        self._beginning: Turns[LargeLaunch] = Turns()  # at most one per session
        self._ended: Turns[EndedLaunch] = Turns()
        self.beginning, self.ended = self._beginning.waiting, self._ended.waiting

    def begin(self, session: Session, launch: Launch, message: m.Launch) -> None:
        """Put the launch in line over the next flushes. Later messages of the session wait until it is in line."""
        session.in_steps += 1
        for entry in launch.entries[: launch.program.arguments]:
            entry.uses += 1  # until its nodes are made
        launch.program.units.begin_launch()
        self._beginning.add(session.number, session.tenant.name, LargeLaunch(session, launch, message))

    def next(self) -> LargeLaunch | None:
        """Return the launch to be put in line whose turn it is."""
        number = self._beginning.next()
        return None if number is None else self.beginning[number][0]

    def remove(self, each: LargeLaunch) -> None:
        """Remove a launch that is in line, or never will be."""
        self._beginning.take(each.session.number)

    def end(self, launch: Launch) -> None:
        """Clear the inner values and nodes of a launch that has ended, over the next flushes."""
        # A run that was delegated, and that its hosts had begun as a whole when it was revoked, has no nodes.
        self._ended.add(launch.session, launch.program.account.tenant, EndedLaunch(launch))

    def clear_ended(self, steps: int) -> None:
        """Free the memory of inner values, and the records of nodes, in `steps` steps for one launch that has ended."""
        number = self._ended.next()
        if number is not None and self._clear(self.ended[number][0], steps):
            program = self._ended.take(number).launch.program
            if program.released and not program.waiting:  # this may have been its last launch
                self._discards.add(*program.large_parts)

    def _clear(self, each: EndedLaunch, steps: int) -> bool:
        """Do steps for a launch that has ended. Return whether it is cleared."""
        launch, inner = each.launch, each.launch.program.inner_values
        values, nodes = inner[each.values : each.values + steps], launch.nodes[-steps:]
        each.values += len(values)
        del launch.nodes[-steps:]
        for value in values:
            if launch.entries[value].blocks:  # few have memory, and a pipeline's step has thousands of values
                self._reservations.release(launch.entries[value])
            launch.entries[value] = NO_ENTRY
        for node in nodes:
            node.end()
        return each.values >= len(inner) and not launch.nodes
