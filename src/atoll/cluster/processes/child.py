"""Child processes: `Child` is waited for, `LocalProcess` is watched by the event loop."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol, TypeVar

import msgspec

from atoll.cluster.environment_variables import JAX_PLATFORMS
from atoll.cluster.processes.leases import FAILED_STATUS, LAPSED_STATUS
from atoll.cluster.processes.lifeline import open_pid, watch_in_loop
from atoll.cluster.processes.oom_kills import OomKills
from atoll.cluster.processes.process_logging import attributed_line
from atoll.cluster.processes.process_runtime import command, end, own_environment
from atoll.decodable import decodable
from atoll.errors import ClusterError

Message = TypeVar("Message")

START_SECONDS = 150.0
END_SECONDS = 5.0


class Child:
    """A process of Atoll that writes a line when it is up or when its start has failed, and maybe one when it ends.

    It has its own session, so Ctrl-C reaches the command but not the process. `options` has a field `ready_fd`. `who`
    names the process in errors. The process prints to the descriptor `output`. `environment` is added to that of this
    process.
    """

    def __init__(
        self,
        module: str,
        options: msgspec.Struct,
        who: str,
        output: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.who = who
        self._is_left = False
        self._readable, writable = os.pipe()
        self._unread = b""  # lines of the process
        # The user's choice of JAX platforms is only for the user's scripts.
        env = {**own_environment(), **(environment or {})}
        env.pop(JAX_PLATFORMS.variable, None)
        try:
            self.process = subprocess.Popen(
                command(module, msgspec.structs.replace(options, ready_fd=writable)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(writable,),
                start_new_session=True,
            )
        except BaseException:
            self.stop_reading()
            raise
        finally:
            os.close(writable)

    def read(self, kind: type[Message], seconds: float = START_SECONDS, *, is_last: bool = True) -> Message:
        """Return the line that the process writes when it is up. Raise ClusterError if it writes none in time.

        If the line is not the last one to be read, a further call returns the next.
        """
        deadline = time.monotonic() + seconds
        try:
            while b"\n" not in self._unread:
                ready, _, _ = select.select([self._readable], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ClusterError(f"{self.who} was not up within {seconds:.0f} s")
                part = os.read(self._readable, 65536)
                if not part:
                    raise ClusterError(f"{self.who} ended before it was up; its messages are above")
                self._unread += part
        except BaseException:
            self.stop_reading()
            raise
        if is_last:
            self.stop_reading()
        line, _, self._unread = self._unread.partition(b"\n")
        return msgspec.json.decode(line, type=decodable(kind))

    def watch(self, on_line: Callable[[], None]) -> None:
        """Call `on_line` on a separate thread when the process writes its next line, which is the last one.

        `read` must have returned the line before, with `is_last=False`. Raise RuntimeError if no thread can start.
        """
        readable, self._readable = self._readable, -1

        def wait() -> None:
            try:
                if self._unread or os.read(readable, 1):
                    on_line()
            finally:
                os.close(readable)

        try:
            threading.Thread(target=wait, name="atoll-child", daemon=True).start()
        except RuntimeError:
            os.close(readable)
            raise

    def stop_reading(self) -> None:
        """Close this end of the pipe from the process, unless that was done after its last line."""
        if self._readable >= 0:
            os.close(self._readable)
            self._readable = -1

    def leave(self) -> None:
        """Leave the process running when this process ends."""
        self._is_left = True
        self.process.returncode = 0  # otherwise Popen warns that it still runs

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it has not ended, also after `leave`."""
        if self._is_left or self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def wait(self) -> None:
        """Block until the process has ended."""
        self.process.wait()

    def end(self) -> None:
        """End the process, with SIGKILL if it does not end within a few seconds."""
        end(self.process, END_SECONDS)


class HasProcess(Protocol):
    """A child, or another object with a process that this one has started."""

    @property
    def process(self) -> subprocess.Popen[bytes]: ...


Waited = TypeVar("Waited", bound=HasProcess)


def wait_for_any(children: Sequence[Waited]) -> Waited:
    """Block until one of the children has ended, and return it. An exception of a signal handler ends the wait."""
    poller = select.poll()
    descriptors: dict[int, Waited] = {}
    try:
        for child in children:
            descriptor = open_pid(child.process.pid)
            if descriptor is None:
                return child
            descriptors[descriptor] = child
        for descriptor in descriptors:
            poller.register(descriptor, select.POLLIN)
        return descriptors[poller.poll()[0][0]]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


_LINES, _BYTES = 20, 4096


class ExitMessage:
    """Copies the `output` of a child process to standard error, on a thread, and keeps its last lines.

    The thread closes `output` at its end. If others than the user of this process may have written the output, `source`
    names them in each line (`attributed_line`).
    """

    def __init__(self, output: IO[bytes], name: str, source: str = "") -> None:
        self._output = output
        self._source = source
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_LINES)
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._output:
            while line := self._output.readline(_BYTES):  # bounded, since the output may have no line breaks
                self._lines.append(line)
                with contextlib.suppress(OSError):
                    sys.stderr.buffer.write(attributed_line(line, self._source) if self._source else line)
                    sys.stderr.buffer.flush()

    def text(self, seconds: float) -> str:
        """Return the last lines of a process that has ended. Wait up to `seconds` for output that is not read yet."""
        self._thread.join(seconds)
        return b"".join(self._lines)[-_BYTES:].decode(errors="replace").rstrip()


def how_it_ended(process: subprocess.Popen[bytes], words: ExitMessage, kills: OomKills, seconds: float) -> str:
    """Wait for the process, and describe its end, such as "exited with 3; its last lines: ...".

    `kills` is as old as the process.
    """
    status = process.wait()
    how = f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
    how += kills.note(status)
    output = words.text(seconds)
    return how + (f"; its last lines:\n{output}" if output else "")


class LocalProcess:
    """A child process whose end is reported on the running loop by one call of `on_end(status)`.

    Its standard output is dropped: libraries print there, and users of scripts should not see that. The constructor
    raises OSError.
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


_LACKS = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


def may_pass(error: OSError) -> bool:
    """Return whether an error of starting a process may pass: it lacks files, memory or the right to more processes."""
    return error.errno in _LACKS


def describe_exit(status: int) -> str:
    """Describe an exit status, such as "exit status 1" or "killed by SIGSEGV"."""
    if status == LAPSED_STATUS:
        return "it received nothing from the controller for its lease"
    if status == FAILED_STATUS:
        return "a bug ended it: see its log"
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Return the name of a signal, or "signal 40" for one that Python does not name, such as a real-time signal."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
