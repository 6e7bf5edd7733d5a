"""A relay: forwards what the controller sends to the hosts of its group, and gathers the ends of what these run.

For a gang over hundreds of hosts the controller so sends and reads one message a group, where it would be one a host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.protocol import messages as m


class SendToHost(Protocol):
    """Sends an encoded message to a host of the group, after what was sent to it before, without waiting for it.

    With `in_pieces`, what is sent later may overtake it.
    """

    def __call__(self, host: int, content: bytes, in_pieces: bool = False, /) -> None: ...


@dataclass(slots=True)
class _Unit:
    """A dispatch unit that runs on so many hosts of the group, and those on which it has ended."""

    left: int
    hosts: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    is_late: bool = False  # it had ended on some host when the relay looked last

    def take(self, sequence: int) -> m.GroupEnds:
        ends = m.GroupEnds(sequence, tuple(self.hosts), tuple(self.times))
        self.hosts, self.times = [], []
        return ends


class GroupRelay:
    """For any thread. `send` sends to a host of the group; `report` to the controller.

    What has ended is reported once all hosts of the group that run it have said so, or a second later: then the
    controller learns which are missing.
    """

    def __init__(self, send: SendToHost, report: Callable[..., None]) -> None:
        self._send = send
        self._report = report
        self._lock = threading.Lock()
        self._units: dict[int, _Unit] = {}  # by sequence

    def forward(self, message: m.Forward) -> None:
        """Does not block."""
        if message.units:
            with self._lock:
                for sequence in message.units:
                    self._units[sequence] = _Unit(len(message.hosts))
        content = message.content
        for host in message.hosts:
            self._send(host, content, message.in_pieces)

    def ended(self, host: int, runs: tuple[tuple[int, int, int], ...]) -> None:
        """Units have ended on a host of the group."""
        gathered = []
        with self._lock:
            for sequence, started, ended in runs:
                unit = self._units.get(sequence)
                if unit is None:  # it was started before the group was made
                    gathered.append(m.GroupEnds(sequence, (host,), (started, ended)))
                    continue
                unit.hosts.append(host)
                unit.times += (started, ended)
                unit.left -= 1
                if not unit.left:
                    del self._units[sequence]
                    gathered.append(unit.take(sequence))
        if gathered:
            self._report(m.Gathered(tuple(gathered)))

    def failed(self, failure: m.MemberFailed) -> None:
        """A unit has failed on a host of the group: the controller learns it at once."""
        self._report(failure)
        with self._lock:
            unit = self._units.get(failure.sequence)
            if unit is None:
                return
            unit.left -= 1
            if unit.left:
                return
            del self._units[failure.sequence]
        if unit.hosts:
            self._report(m.Gathered((unit.take(failure.sequence),)))

    def tick(self) -> None:
        """Once a second: reports what has ended on some hosts, and not on others for a while."""
        gathered = []
        with self._lock:
            for sequence, unit in self._units.items():
                if unit.is_late and unit.hosts:
                    gathered.append(unit.take(sequence))
                unit.is_late = bool(unit.hosts)
        if gathered:
            self._report(m.Gathered(tuple(gathered)))

    def statistics(self) -> dict[str, int]:
        """How many units are on their way."""
        return {"units": len(self._units)}
