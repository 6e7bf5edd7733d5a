"""The relay of a process of several islands: one connection for the gangs and pings of all of its hosts.

The controller sends one message per process instead of one per host, and reads one. Islands join and leave one by one:
a host receives messages through the relay from `AddMember` on, until its island ends. `host_group` has the other half,
and the relays of groups of hosts that have processes of their own.

Messages that were sent to an earlier incarnation of an island precede `AddMember` of the next one, so they are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.protocol import messages as m
from atoll.worker.host_group import HostGroup, PongRound, decoded

# Time from the first end of units that were started together until the ends are reported that have occurred by then.
GATHER_SECONDS = 0.002


class _Batch:
    """Dispatch units that were started by one message, of which some have not ended."""

    __slots__ = ("hosts", "left", "sequences", "times")

    def __init__(self, left: int) -> None:
        self.left = left
        self.hosts: list[int] = []  # on which units have ended that are not reported yet
        self.sequences: list[int] = []
        self.times: list[int] = []

    def take(self) -> m.MembersDone:
        ends = m.MembersDone(tuple(self.hosts), tuple(self.sequences), tuple(self.times))
        self.hosts, self.sequences, self.times = [], [], []
        return ends


class ProcessRelay:
    """Forwards messages to the hosts of this process, and gathers their answers to pings and the ends of their units.

    All methods are called on one thread.

    Args:
      report: sends messages to the controller.
      later: makes a call after a time in seconds.
    """

    def __init__(self, report: Callable[..., None], later: Callable[[float, Callable[[], None]], object]) -> None:
        self._report = report
        self._later = later
        self._hosts: dict[int, tuple[int, HostGroup]] = {}  # by number, with their incarnations
        self._members: dict[int, HostGroup] = {}  # those that the controller has added
        self._batches: dict[tuple[int, int], _Batch] = {}  # by host and unit
        self._late: dict[_Batch, None] = {}  # batches with ends to report
        self._is_scheduled = False
        self._pongs = PongRound()

    # ---- hosts

    def host_started(self, host: int, incarnation: int, group: HostGroup) -> None:
        """Note that a host can receive messages. It does so when the controller has added it."""
        self._hosts[host] = incarnation, group

    def host_ended(self, host: int, group: HostGroup) -> None:
        """Drop later messages to a host, and stop waiting for its units."""
        if host in self._hosts and self._hosts[host][1] is group:
            del self._hosts[host]
            self._members.pop(host, None)
            for key in [key for key in self._batches if key[0] == host]:
                self._leave(self._batches.pop(key))

    # ---- messages of the controller

    def handle(self, message: Any) -> None:
        """Handle a message of the controller."""
        if type(message) is m.AddMember:
            incarnation, group = self._hosts.get(message.host, (-1, None))
            if group is not None and incarnation == message.incarnation:
                self._members[message.host] = group
        elif type(message) is m.Forward:
            self._forward(message)

    def _forward(self, forward: m.Forward) -> None:
        members, runs = self._members, forward.runs
        there = [(i, host) for i, host in enumerate(forward.hosts) if host in members]
        for unit in forward.units:
            batch = _Batch(len(there))
            self._batches.update(((host, unit + runs[i] if runs else unit), batch) for i, host in there)
        message = decoded(forward.content)
        if forward.asks:
            self._report_pongs(self._pongs.begin(len(there)))
        for i, host in there:
            members[host].receive_message(_on(message, runs[i]) if runs else message)

    # ---- ends of units

    def ended(self, host: int, runs: tuple[tuple[int, int, int], ...]) -> None:
        """Gather units that have ended on a host. Report those of a batch together."""
        for sequence, started, ended in runs:
            batch = self._batches.pop((host, sequence), None)
            if batch is None:  # it was started before the host was added
                self._report(m.MembersDone((host,), (sequence,), (started, ended)))
                continue
            batch.hosts.append(host)
            batch.sequences.append(sequence)
            batch.times += (started, ended)
            self._leave(batch)

    def failed(self, failure: m.MemberFailed) -> None:
        """Report at once that a unit has failed on a host."""
        self._report(failure)
        batch = self._batches.pop((failure.host, failure.sequence), None)
        if batch is not None:
            self._leave(batch)

    def answered(self, host: int, pong: m.Pong) -> None:
        """Take the answer of a host to a ping. Report the answers of all hosts together."""
        self._report_pongs(self._pongs.answered(host, pong))

    def _report_pongs(self, answers: tuple[m.RelayedPong, ...]) -> None:
        if answers:
            self._report(m.MembersDone((), (), (), answers))

    def _leave(self, batch: _Batch) -> None:
        """Note that a unit of the batch has ended, or will not end."""
        batch.left -= 1
        if not batch.left:
            self._late.pop(batch, None)
            if batch.hosts:
                self._report(batch.take())
        elif batch.hosts:
            self._late[batch] = None
            if not self._is_scheduled:
                self._is_scheduled = True
                self._later(GATHER_SECONDS, self._report_late)

    def _report_late(self) -> None:
        self._is_scheduled = False
        late, self._late = self._late, {}
        for batch in late:
            self._report(batch.take())

    def statistics(self) -> dict[str, int]:
        """Return the number of hosts, and of units in flight."""
        return {"hosts": len(self._members), "units": len(self._batches)}


def _on(message: Any, run: int) -> Any:
    """Return the message for a host on which the run has this number."""
    if type(message) is m.Run:
        return msgspec.structs.replace(message, sequence=run)
    units = tuple([(run + sequence, segments) for sequence, segments in message.units])
    return m.Dispatch(message.session, run, units)
