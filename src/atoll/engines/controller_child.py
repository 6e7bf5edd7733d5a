"""The controller as a child of the engine process, which restarts it from its journal."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable

from msgspec.structs import replace

from atoll.cluster.processes.child import LocalProcess
from atoll.cluster.processes.process_runtime import command
from atoll.controller_process.controller_options import (
    ALONE,
    CANNOT_RESTART,
    FOLLOWED,
    FOLLOWS,
    READY,
    RUNS,
    SUPERSEDED,
    ControllerOptions,
)
from atoll.engines.controller_end import ControllerEnd, ControllerReports, NextStep
from atoll.engines.restart_rules import RETRY_SECONDS, RestartPolicy, StartRetries
from atoll.errors import ClusterError, IncompatibleJournalError, LeaseError, SupersededError
from atoll.leadership.lease_address import open_lease
from atoll.leadership.lease_keeper import RELEASE_SECONDS, release_lease

_log = logging.getLogger(__name__)

_END_SECONDS = 1.0
# Errors of a start that no later start avoids, by the controller's exit status.
_KINDS = {CANNOT_RESTART: IncompatibleJournalError, SUPERSEDED: SupersededError}
_MAX_FAILURES = 3  # consecutive starts that failed, after which the controller is not restarted


class ControllerChild:
    """Runs the controller, and restarts it if it ends unexpectedly after it has begun its journal.

    `on_ready()` is called when all hosts have joined, `on_end(text)` when the controller has ended, `on_replaced(text)`
    when it has ended because another controller has taken over, and `on_runs()` when it serves the cluster.
    """

    def __init__(
        self,
        options: ControllerOptions,
        on_ready: Callable[[], None],
        on_end: Callable[[str], None],
        on_replaced: Callable[[str], None] = lambda text: None,
        on_runs: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = replace(options, lease_holder=_holder()) if options.lease else options
        self._on_ready = on_ready
        self._on_end = on_end
        self._on_replaced = on_replaced
        self._on_runs = on_runs
        self._process: LocalProcess | None = None
        self._readable = -1
        self._failures = 0  # failed starts since a controller has run
        self._reports = ControllerReports()  # of the controller that runs
        self._last_end: ControllerEnd | None = None  # of the last controller that has ended
        self._has_run = False
        self._policy = RestartPolicy("the controller")  # for restarts after bugs
        self._retries = StartRetries("the controller", _log.warning)
        self._followed_by = ""  # address of the standby that takes over if it ends
        self._is_ending = False
        self._retry: asyncio.TimerHandle | None = None  # of a restart
        self._has_ended = asyncio.Event()

    @property
    def was_asked(self) -> bool:
        """Whether the controller has ended because an operator asked for it."""
        return self._last_end is not None and self._last_end.was_asked

    @property
    def was_superseded(self) -> bool:
        """Whether the last controller has ended because another one has taken over."""
        return self._last_end is not None and self._last_end.is_superseded

    @property
    def followed_by(self) -> str:
        """The address of the standby that follows the controller or has taken over from it, or "" if none is known."""
        return self._followed_by

    def start_error(self, what: str, text: str, advice: str = "") -> ClusterError:
        """Return the error for the start of `what`, which failed because the last controller has ended."""
        end = self._last_end
        kind = ClusterError if end is None else _KINDS.get(end.status, ClusterError)
        where = "" if end is not None and end.has_reason else "; its messages are above"
        return kind(f"{what} did not start: {text}{where}{advice}")

    def start(self) -> None:
        """Start the controller. Raise OSError if the process cannot be started."""
        readable, writable = os.pipe()
        os.set_blocking(readable, False)
        try:
            options = replace(self._options, ready_fd=writable)
            self._process = LocalProcess(
                command("atoll.controller_process.controller_main", options), os.environ, self._ended, (writable,)
            )
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        self._readable = readable
        asyncio.get_running_loop().add_reader(readable, self._read)

    def _read(self) -> None:
        """Read the controller's state from its pipe, which ends with the process at the latest."""
        try:
            output = os.read(self._readable, 4096)
        except BlockingIOError:
            return
        if not output:
            self._stop_reading()
        for line in output.splitlines(keepends=True):
            if line.startswith(FOLLOWED):
                self._followed_by = line.removeprefix(FOLLOWED).decode(errors="replace").strip()
            elif line == ALONE:
                self._followed_by = ""
            else:
                self._reports.take(line)
        if RUNS in output:
            self._failures, self._has_run = 0, True
            self._options = replace(self._options, restarts=bool(self._options.journal))
            self._on_runs()
        if READY in output or FOLLOWS in output:
            self._on_ready()

    def _stop_reading(self) -> None:
        if self._readable >= 0:
            asyncio.get_running_loop().remove_reader(self._readable)
            os.close(self._readable)
            self._readable = -1

    def _ended(self, status: int) -> None:
        if self._readable >= 0:
            self._read()
        self._stop_reading()
        end = self._last_end = ControllerEnd(status, self._reports, self._followed_by, self._is_ending)
        self._reports = ControllerReports()
        text, step = end.text, end.next_step
        if step is NextStep.SERVE_OTHER:
            # Peers are connected to the other controller already, or find it within their grace time.
            _log.warning("%s", text if end.is_superseded else f"{text}; {end.successor} takes over")
            self._has_ended.set()
            if self._options.lease and not end.is_superseded:
                threading.Thread(target=self._release_lease, args=(True,), name="lease").start()
            self._on_replaced(text)
            return
        may_restart = self._failures < _MAX_FAILURES
        if end.counts and not self._policy.allow(asyncio.get_running_loop().time()):
            text, may_restart = f"{text}; {self._policy.reason}", False
        if step is NextStep.RESTART and self._options.restarts and may_restart:
            self._failures += 1
            _log.warning("%s; restarting it", text)
            self._restart(text)
            return
        self._has_finished(text, is_expected=end.is_expected)

    def _restart(self, text: str) -> None:
        """Start the controller again. While files or memory are lacking for it, try again, for a while."""
        self._retry = None
        try:
            self.start()
        except OSError as error:
            loop = asyncio.get_running_loop()
            if not self._retries.allow(error, loop.time()):
                self._has_finished(f"{text}, and cannot be restarted: {error}", is_expected=False)
                return
            self._retry = loop.call_later(RETRY_SECONDS, self._restart, text)
        else:
            self._retries.started()

    def _has_finished(self, text: str, *, is_expected: bool) -> None:
        if not is_expected and self._has_run:  # otherwise the cluster did not start, and `on_end` reports that
            _log.error("the cluster ends: %s", text)
        self._has_ended.set()
        self._on_end(text)

    def _release_lease(self, keep_standby: bool) -> None:
        """Release the lease of a controller that has ended, so that nobody need wait until it expires.

        Its standby can acquire it if `keep_standby`.
        """
        try:
            lease, holder = open_lease(self._options.lease), self._options.lease_holder
            release_lease(lease, holder, keep_standby=keep_standby)
        except LeaseError as error:
            _log.warning("cannot release the lease of the controller, which expires by itself: %s", error)

    async def end(self) -> None:
        """End the controller, by force after a second. The controller ends its workers, so that none looks lost.

        A controller with an external lease has more time, to release the lease.
        """
        self._is_ending = True
        if self._retry is not None:  # no controller runs
            self._retry.cancel()
            self._has_finished("the cluster ended while its controller could not be restarted", is_expected=True)
        if self._process is None:
            return
        self._process.terminate()
        try:
            seconds = _END_SECONDS + (RELEASE_SECONDS if self._options.lease else 0.0)
            await asyncio.wait_for(self._has_ended.wait(), seconds)
        except TimeoutError:
            self._process.kill()
            await self._has_ended.wait()
            if self._options.lease:
                await asyncio.to_thread(self._release_lease, False)


def _holder() -> str:
    """Return a name for the controllers of this process, one at a time, that no other process has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
