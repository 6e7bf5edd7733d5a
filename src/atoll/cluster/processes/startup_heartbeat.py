"""A child process that starts, and gives signs of life until it is ready.

A sign is a word of its own, or CPU time. Who imports computes; and who waits for something that takes as long as
it takes, such as XLA for the other hosts of an island, says so each second, from a thread. A process that does neither
hangs: it is stopped, say, or an import does not return. Nobody else would miss it: it is connected to nothing yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from atoll.cluster.processes.leases import Leases
from atoll.cluster.processes.local_process import LocalProcess
from atoll.cluster.processes.process_table import cpu_ticks

SIGN_SECONDS = 1.0  # between two words of a process that waits
LOOK_SECONDS = 0.25  # between two looks at a process
_PROCESS = 0  # the one peer of the lease


class StartupHeartbeat:
    """What a process says while it starts, to the one that has started it: to nobody where `descriptor` is -1."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            os.set_blocking(descriptor, False)

    @classmethod
    def of_arguments(cls) -> StartupHeartbeat:
        """Of this process, where a `StartingProcess` has started it."""
        return cls(int(sys.argv[2]) if len(sys.argv) > 2 else -1)

    def say(self, what: str) -> None:
        """What it does from now on, as in "imported JAX"; for people."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # nobody reads, or not as fast
                os.write(self._descriptor, what.encode() + b"\n")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says so again and again: what is done here may take its time without any other sign of life."""
        over = threading.Event()

        def repeat() -> None:
            while not over.is_set():
                self.say(what)
                over.wait(SIGN_SECONDS)

        thread = threading.Thread(target=repeat, name="atoll-start", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def ready(self) -> None:
        """It has started: from now on others notice where it is silent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StartWatch:
    """Whether a process that starts has been silent for more than `seconds`. Pure: the caller brings the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases = Leases(seconds, LOOK_SECONDS)
        self._used = -1

    def is_silent(self, now: float, used: int, *, has_spoken: bool) -> bool:
        """To be asked every `LOOK_SECONDS`: it has spoken since, or not; `used` grows while it runs."""
        if has_spoken or used > self._used:
            self._used = used
            self._leases.renew(_PROCESS, now)
        return bool(self._leases.expired(now))


class StartingProcess(LocalProcess):
    """A child that gives `StartupHeartbeat`, and is killed where it gives none for `seconds` while it starts.

    The number of their descriptor is added to its command, whose only argument are its options.
    `on_end(status, reason)` is called as that of a LocalProcess; `reason` says why it was killed while it started, ""
    where it has ended otherwise. Raises OSError.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[int, str], None],
        seconds: float,
    ) -> None:
        self._on_end = on_end
        self._watch = StartWatch(seconds)
        self._did = "started Python"
        self._has_spoken = False
        self._reason = ""
        self._loop = asyncio.get_running_loop()
        self._readable, writable = os.pipe()
        os.set_blocking(self._readable, False)
        try:
            super().__init__([*command, str(writable)], environment, self._ended, (writable,))
        except BaseException:
            os.close(self._readable)
            raise
        finally:
            os.close(writable)
        self._loop.add_reader(self._readable, self._read)
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _read(self) -> None:
        try:
            said = os.read(self._readable, 4096)
        except BlockingIOError:
            return
        self._has_spoken = True
        if said:
            self._did = said.decode(errors="replace").splitlines()[-1]
        else:
            self._stop_watching()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        has_spoken, self._has_spoken = self._has_spoken, False
        if self._watch.is_silent(self._loop.time(), cpu_ticks(self.pid), has_spoken=has_spoken):
            seconds = f"{self._watch.seconds:.0f} s"
            self.give_up(f"it gave no sign of life for {seconds} while it {self._did}, and was killed")

    def give_up(self, reason: str) -> None:
        """Kills it where it still starts, which it will not do for this reason. Does nothing once it is ready."""
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
