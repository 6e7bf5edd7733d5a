"""The heartbeat of a child process until it is ready, and its watch by the parent.

A process that imports uses CPU time. A process that waits, as XLA does for the other hosts of an island, writes to a
pipe each second, from a thread. A process that does neither hangs: for example, it is stopped, or an import does not
return. Only the parent can detect that, since the process has no connections yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from atoll.cluster.processes.child import LocalProcess
from atoll.cluster.processes.leases import Leases
from atoll.cluster.processes.process_table import cpu_ticks, switches
from atoll.retries import Reasons

_log = logging.getLogger(__name__)

SIGN_SECONDS = 1.0  # between two messages of a process that waits
LOOK_SECONDS = 0.25  # between two checks of a process
_PROCESS = 0  # the only peer of the lease
_READY = "is ready"  # the last message of a process that has started


class StartupHeartbeat:
    """Sends the progress of a process that starts to its parent, on `descriptor`; to nobody if that is -1."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)

    @classmethod
    def of_arguments(cls) -> StartupHeartbeat:
        """Return the heartbeat of this process, with a descriptor if a `StartingProcess` has started it."""
        return cls(int(sys.argv[2]) if len(sys.argv) > 2 else -1)

    def report(self, activity: str) -> None:
        """Send what the process does from now on, such as "imported JAX", for messages about a hang."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # nobody reads, or the pipe is full
                os.write(self._descriptor, activity.encode() + b"\n")

    @contextlib.contextmanager
    def waiting(self, activity: str) -> Iterator[None]:
        """Send the activity each second within this block, which may take long without CPU time."""
        over = threading.Event()

        def repeat() -> None:
            while not over.is_set():
                self.report(activity)
                over.wait(SIGN_SECONDS)

        thread = threading.Thread(target=repeat, name="atoll-start", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def ready(self) -> None:
        """End the heartbeat: the process has started, and its peers detect its silence from now on."""
        if self._descriptor >= 0:
            self.report(_READY)
            os.close(self._descriptor)
            self._descriptor = -1


class StartWatch:
    """Detects that a process that starts has been silent for more than `seconds`. Pure: the caller passes the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases = Leases(seconds, LOOK_SECONDS)
        self._used = -1

    def is_silent(self, now: float, used: int | None, *, has_spoken: bool) -> bool:
        """Return whether the process has been silent for too long. Call this every `LOOK_SECONDS`.

        `used` is a number that grows while the process runs; None if it is unknown, and then the process counts as
        running. `has_spoken` says if it has sent anything since the last call.
        """
        if has_spoken or used is None or used > self._used:
            self._used = self._used if used is None else used
            self._leases.renew(_PROCESS, now)
        return bool(self._leases.expired(now))


class ProcessActivity:
    """Reads a number that grows while process `pid` runs: its CPU time, and `with_switches` its context switches."""

    def __init__(self, pid: int, *, with_switches: bool = False) -> None:
        self._pid = pid
        self._with_switches = with_switches
        self._unknown = Reasons(_log)

    def read(self) -> int | None:
        """Return the number, or None if it cannot be read."""
        try:
            return cpu_ticks(self._pid) + (switches(self._pid) if self._with_switches else 0)
        except OSError as error:
            self._unknown.log(f"cannot detect whether process {self._pid} hangs: {error}")
            return None


class StartingProcess(LocalProcess):
    """A child with a `StartupHeartbeat`, which is killed if that stops for `seconds` before it is ready.

    The number of the heartbeat's descriptor is appended to `command`, whose only argument is the options.
    `on_end(status, reason)` is called once on the running loop; `reason` says why the process was killed while it
    started, "" otherwise. `on_ready()` is called at most once, before `on_end`. The child inherits `descriptors`. The
    constructor raises OSError.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[int, str], None],
        seconds: float,
        descriptors: tuple[int, ...] = (),
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end = on_end
        self._on_ready = on_ready
        self._watch = StartWatch(seconds)
        self._did = "started Python"
        self._has_spoken = False
        self._reason = ""
        self._loop = asyncio.get_running_loop()
        self._readable, writable = os.pipe()
        os.set_blocking(self._readable, False)
        try:
            super().__init__([*command, str(writable)], environment, self._ended, (writable, *descriptors))
        except BaseException:
            os.close(self._readable)
            raise
        finally:
            os.close(writable)
        self._loop.add_reader(self._readable, self._read)
        self._activity = ProcessActivity(self.pid)
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _read(self) -> None:
        try:
            output = os.read(self._readable, 4096)
        except BlockingIOError:
            return
        self._has_spoken = True
        if output:
            self._did = output.decode(errors="replace").splitlines()[-1]
        else:
            self._stop_watching()
            if self._did == _READY:  # otherwise the process has ended
                self._on_ready()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        has_spoken, self._has_spoken = self._has_spoken, False
        if self._watch.is_silent(self._loop.time(), self._activity.read(), has_spoken=has_spoken):
            seconds = f"{self._watch.seconds:.0f} s"
            self.give_up(f"it gave no sign of life for {seconds} while it {self._did}, and was killed")

    def give_up(self, reason: str) -> None:
        """Kill the process if it still starts, since its start must fail for this reason."""
        if self._readable >= 0:
            self._reason = reason
            self._stop_watching()
            self.kill()

    def _stop_watching(self) -> None:
        if self._readable >= 0:
            self._timer.cancel()
            self._loop.remove_reader(self._readable)
            os.close(self._readable)
            self._readable = -1

    def _ended(self, status: int) -> None:
        self._stop_watching()
        self._on_end(status, self._reason)
