"""A child process on this machine, watched by the event loop."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from atoll.cluster.processes.leases import FAILED_STATUS, LAPSED_STATUS
from atoll.cluster.processes.lifeline import watch_in_loop


class LocalProcess:
    """A child of this process. `on_end(status)` is called once on the running loop; see `engine.HostProcess`.

    What libraries print to its standard output is dropped: it is not for the user of a script. Raises OSError.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[int], None],
        descriptors: tuple[int, ...] = (),
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=descriptors,
        )
        watch_in_loop(self._process.pid, lambda: on_end(self._process.wait()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def describe_exit(status: int) -> str:
    """An exit status for a person: "exit status 1", or "killed by SIGSEGV"."""
    if status == LAPSED_STATUS:
        return "it heard nothing of the controller for its lease"
    if status == FAILED_STATUS:
        return "a bug has ended it, which its log describes"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
