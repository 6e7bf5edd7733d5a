"""The worker's side of a Python process: starts, feeds, watches and ends it.

Only the threads of this module wait for the process, whatever it does: one thread sends, one receives and detects its
end, one reads its output, and a pool sends inputs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from atoll.cluster.environment_variables import PYTHON_ENVIRONMENT, PYTHON_PATH
from atoll.cluster.processes.bugs import described, start_in
from atoll.cluster.processes.child import ExitMessage, how_it_ended
from atoll.cluster.processes.lifeline import open_pid
from atoll.cluster.processes.oom_kills import OomKills
from atoll.cluster.processes.priorities import restore_priority
from atoll.cluster.processes.process_runtime import (
    command,
    own_environment,
    with_malloc_tuning,
)
from atoll.cluster.sandbox.grants import Sandbox, View
from atoll.errors import FrameError, StatusError
from atoll.host_services.python.python_link import PythonLink
from atoll.host_services.python.rendezvous import Rendezvous
from atoll.protocol.messages import python_messages as m
from atoll.transfers.inbox import MAX_INBOX_BYTES

_log = logging.getLogger(__name__)

_MODULE = "atoll.host_services.python.program.python_main"
# Variables of the machine, the language and the libraries. None of them contains a credential.
_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "HOSTNAME", "TMPDIR"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "GLIBC_TUNABLES"),
        *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NPROC", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    )
)
_PREFIXES = ("LC_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "NUMEXPR_", "MALLOC_", "TF_CPP_", "XDG_DATA_")
_INPUT_THREADS = 8
_END_SECONDS = 1.0
# Of the record of contents, which may have no bytes.
_ARRAY_BYTES = 256

# Sends messages or arrays on a link.
Send = Callable[[PythonLink], None]


class PythonProcess:
    """A Python process that is starting or running.

    A thread calls `on_message(message)` for each message, and `on_end(reason)` when the process has ended or was killed
    and will execute no more code. It calls `on_gone()` last, because a killed process may need a long time to free its
    memory on a busy host.

    `expected()` returns the bytes of the results that are due. The process may send these and MAX_INBOX_BYTES more.
    """

    def __init__(
        self,
        name: str,
        options: m.PythonOptions,
        rendezvous: Rendezvous,
        on_message: Callable[[Any], None],
        on_end: Callable[[str], None],
        on_gone: Callable[[], None],
        expected: Callable[[], int],
    ) -> None:
        self.name = name
        self._options = options
        self._rendezvous = rendezvous
        self._on_message = on_message
        self._on_end = on_end
        self._on_gone = on_gone
        self._is_over = False  # whether `on_end` was called
        self._expected = expected
        self._contents: dict[int, np.ndarray[Any, Any]] = {}
        self._held = 0  # bytes of `_contents`, with those of the records
        self._outbox: queue.SimpleQueue[Send | None] = queue.SimpleQueue()
        self._inputs = ThreadPoolExecutor(_INPUT_THREADS, f"atoll-python-input-{name}")
        self._process: subprocess.Popen[bytes] | None = None
        self._link: PythonLink | None = None
        self._is_killed = False
        self._problem = ""  # the reason why this side ended the process
        self._lock = threading.Lock()

    # ---- from the worker

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"atoll-python-{self.name}", daemon=True).start()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. Does not block."""
        self._outbox.put(lambda link: link.send(message))

    def call(self, call: m.Call, send: Send, later: Send | None) -> None:
        """Queue a call. `send` sends inputs before the call. `later` sends the other inputs, and may block."""

        def both(link: PythonLink) -> None:
            send(link)
            link.send(call)
            if later is not None:
                start_in(self._inputs, self._guarded, later, link)

        self._outbox.put(both)

    def send_array(self, send: Send) -> None:
        """Send an array that the process has requested. `send` may block."""
        link = self._link
        assert link is not None  # because the process has sent a request
        with contextlib.suppress(RuntimeError):  # the process has ended
            start_in(self._inputs, self._guarded, send, link)

    def kill(self) -> None:
        """End the process and its children: with SIGTERM, and with SIGKILL a moment later."""
        with self._lock:
            self._is_killed = True
            process, link = self._process, self._link
        if process is not None:
            _signal(process, signal.SIGTERM)
        if link is not None:
            link.close()

    def kill_at_once(self) -> None:
        """End the process and its children with SIGKILL. XLA handles SIGTERM, so `kill` takes a second."""
        with self._lock:
            process = self._process
        if process is not None:
            _signal(process, signal.SIGKILL)

    def give_up(self, reason: str) -> None:
        """End a process that is starting. It ends at once for its session, also while it waits for other hosts."""
        with self._lock:
            self._problem = self._problem or reason
            is_started = self._process is not None
        self.kill()
        if not is_started:
            self._report_end(reason)

    # ---- its threads

    def _run(self) -> None:
        ours, theirs = socket.socketpair()
        link = self._link = PythonLink(ours, m.FromPython)
        reason = "did not start"
        try:
            coordinator_address = self._rendezvous()
            with self._lock:
                if not self._is_killed:
                    self._process = self._start(theirs, coordinator_address)
            theirs.close()
            if self._process is not None:
                reason = self._serve(self._process, link)
        except (OSError, StatusError) as error:
            reason = f"cannot be started: {error}"
        finally:
            theirs.close()
            link.close()
            self._outbox.put(None)
            self._inputs.shutdown(wait=False, cancel_futures=True)
            self._report_end(reason)
            self._on_gone()

    def _report_end(self, reason: str) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if not was_over:
            self._on_end(f"the Python process of {self.name} {reason}")

    def _serve(self, process: subprocess.Popen[bytes], link: PythonLink) -> str:
        """Serve the link until the process ends it. Return how the process ended."""
        assert process.stdout is not None
        kills = OomKills()
        is_of_tenant = self._options.sandbox.view is View.GRANTED
        words = ExitMessage(process.stdout, f"atoll-python-log-{self.name}", self.name if is_of_tenant else "")
        threading.Thread(target=self._send, args=(link,), name=f"atoll-python-out-{self.name}", daemon=True).start()
        try:
            link.receive(self._on_message, self._keep, MAX_INBOX_BYTES)
        except Exception as error:  # caused by data from the process
            self._end_by(f"sent invalid data: {described(error)}", error)
        if not _ends_soon(process):  # it has closed the link, usually because it is ending
            _signal(process, signal.SIGTERM)
            _ends_soon(process)
        _signal(process, signal.SIGKILL)
        if not _ends_soon(process):
            self._report_end(self._because("was killed"))
        return self._because(how_it_ended(process, words, kills, _END_SECONDS))

    def _because(self, how: str) -> str:
        return f"{self._problem}, and {how}" if self._problem else how

    def _start(self, theirs: socket.socket, coordinator_address: str) -> subprocess.Popen[bytes]:
        options = msgspec.structs.replace(
            self._options, descriptor=theirs.fileno(), coordinator_address=coordinator_address
        )
        Path(options.sandbox.scratch).mkdir(mode=0o700, parents=True, exist_ok=True)
        return subprocess.Popen(
            command(_MODULE, options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(options.sandbox),
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )

    def _keep(self, feed: int, contents: np.ndarray[Any, Any]) -> None:
        if feed in self._contents:
            raise FrameError(f"the contents {feed} have arrived twice")
        self._contents[feed] = contents
        self._held += contents.nbytes + _ARRAY_BYTES
        if self._held > MAX_INBOX_BYTES and self._held > MAX_INBOX_BYTES + self._expected():
            raise FrameError(f"{self._held} bytes that belong to no result")

    def take(self, feed: int) -> np.ndarray[Any, Any]:
        """Return contents that arrived before a message. Call it only in `on_message`. Raise FrameError if missing."""
        contents = self._contents.pop(feed, None)
        if contents is None:
            raise FrameError(f"the contents {feed} have not arrived")
        self._held -= contents.nbytes + _ARRAY_BYTES
        return contents

    def _send(self, link: PythonLink) -> None:
        while (send := self._outbox.get()) is not None:
            self._guarded(send, link)

    def _guarded(self, send: Send, link: PythonLink) -> None:
        try:
            send(link)
        except OSError:
            pass  # the process has ended; `_run` handles this
        except Exception as error:
            self._end_by(f"could not get its input: {described(error)}", error)

    def _end_by(self, problem: str, error: Exception) -> None:
        """End the process because of an exception, and report that to its session as the reason."""
        _log.warning("the Python process of %s %s", self.name, problem, exc_info=error)
        self._problem = self._problem or problem
        self.kill()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process and its children."""
    if process.returncode is None:  # otherwise another process may have its number
        with contextlib.suppress(ProcessLookupError):
            restore_priority(process.pid)
            os.killpg(process.pid, number)


def _ends_soon(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process ends within `_END_SECONDS`. Does not reap it, so its group's number stays valid."""
    descriptor = open_pid(process.pid)
    if descriptor is None:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(_END_SECONDS * 1000))
    finally:
        os.close(descriptor)


def _environment(sandbox: Sandbox) -> dict[str, str]:
    """Return the variables of the worker's environment that users' Python gets. None of them contains a credential.

    `ATOLL_PYTHON_ENVIRONMENT` adds names; "*" adds all variables except those of Atoll and JAX.
    """
    own = {name: value for name, value in own_environment().items() if not name.startswith(("ATOLL_", "JAX_"))}
    added = {each.strip() for each in PYTHON_ENVIRONMENT.text().split(",")}
    env = {
        name: value
        for name, value in own.items()
        if "*" in added or name in added or name in _NAMES or name.startswith(_PREFIXES)
    }
    home = {"HOME": sandbox.scratch} if sandbox.view is View.GRANTED else {}
    path = PYTHON_PATH.text()
    return with_malloc_tuning(env) | {"JAX_PLATFORMS": "cpu", "TMPDIR": sandbox.scratch, "PYTHONPATH": path} | home
