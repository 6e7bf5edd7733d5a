"""Which units keep this host's devices busy now: the controller charges these, and no others, if they last too long.

A unit may be in flight without that. It waits for bytes of other hosts, for a user's Python, or for a client that reads
its results slowly, or it is behind another unit on its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.protocol import messages as m
from atoll.worker.completions import Completion, RunCompletion
from atoll.worker.dispatch_unit import DispatchUnit

# Stands for all devices of a host in a run on several of them: XLA's CPU devices do one such run at a time.
_TOGETHER = -1


class Occupancy:
    """The executor's thread adds units, and any thread may call the rest.

    `report` gets the messages of the method of that name. `devices_of(unit)` returns the devices of what a unit is
    enqueuing.
    """

    def __init__(self, report: Callable[..., None], devices_of: Callable[[DispatchUnit], tuple[int, ...]]) -> None:
        self._report = report
        self._devices_of = devices_of
        self._units: dict[int, Sequence[Completion]] = {}  # begun and not reported as ended, in order
        # The unit that the executor's thread is in. XLA may run a program inside the call that enqueues it.
        self.executing: DispatchUnit | None = None

    def begun(self, sequence: int, completions: Sequence[Completion]) -> None:
        """Note that the unit has enqueued all that it enqueues."""
        self._units[sequence] = completions

    def report(self, *messages: Any) -> None:
        """Note which units have ended, and pass the messages on."""
        for message in messages:
            if type(message) is m.Done:
                for sequence, _, _ in message.runs:
                    self._units.pop(sequence, None)
            elif type(message) is m.Failed:
                self._units.pop(message.sequence, None)
        self._report(*messages)

    def running(self) -> list[int]:
        """Return the units whose devices no earlier unit keeps busy."""
        executing = self.executing
        units = [(sequence, _busy(completions)) for sequence, completions in list(self._units.items())]
        if executing is not None:
            units.append((executing.sequence, _and_together(self._devices_of(executing))))
        found: list[int] = []
        busy: set[int] = set()
        for sequence, devices in units:
            if devices and busy.isdisjoint(devices):
                found.append(sequence)
            busy |= devices
        return found


def _busy(completions: Sequence[Completion]) -> set[int]:
    """Return the devices on which runs among the completions have not ended."""
    found: set[int] = set()
    for each in completions:
        if isinstance(each, RunCompletion):
            found |= _and_together(each.busy_devices())
    return found


def _and_together(devices: tuple[int, ...]) -> set[int]:
    return {*devices, _TOGETHER} if len(devices) > 1 else set(devices)
