"""End a process at the first bug, an unhandled exception on any thread. The process reports it first.

A bug that is only logged becomes a hang, since another process waits for the result. So no thread of a worker has a
catch-all. `BugTrap.watch_threads` covers all threads. The futures of a pool hide exceptions, so work on a pool is
covered only if `start_in` starts it or if other code waits for its future.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import atoll
from atoll.cluster.processes.leases import FAILED_STATUS
from atoll.errors import AtollError

_log = logging.getLogger(__name__)

_PACKAGE = str(Path(atoll.__file__).parent) + os.sep
_MAX_CHARACTERS = 400
_TELL_SECONDS = 2.0  # for the report to be sent, before the process ends in any case
_LINGER_SECONDS = 0.1  # a socket that is closed with unread input may discard what it has sent


def described(error: BaseException) -> str:
    """Return one line about `error`, such as "TypeError: not callable (worker/completion_reporter.py:42)".

    The place is the innermost frame in Atoll.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.filename.startswith(_PACKAGE) and frame.filename != __file__]
    place = f" ({places[-1].filename.removeprefix(_PACKAGE)}:{places[-1].lineno})" if places else ""
    text = " ".join(str(error).split())
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}..."
    return f"{type(error).__name__}{text and f': {text}'}{place}"


class BugTrap:
    """Ends this process with `FAILED_STATUS` at the first bug.

    `tell(text)` reports the bug to others. It is called on a separate thread and may block: the process ends at most
    `_TELL_SECONDS` later. `process` names this process in its log.
    """

    def __init__(self, process: str, tell: Callable[[str], None] = lambda text: None) -> None:
        self._process = process
        self._tell = tell
        self._lock = threading.Lock()

    def watch_threads(self) -> None:
        """End the process if a thread ends with an exception from now on."""
        threading.excepthook = self._thread_ended

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the process if a callback or a task of the loop raises an exception that is not a connection's."""
        loop.set_exception_handler(self._loop_failed)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_of_connection = "transport" in context or "protocol" in context  # the loop has closed it
        if error is None or is_of_connection or isinstance(error, OSError | AtollError | SystemExit):
            loop.default_exception_handler(context)
        else:
            self.end(error)

    def _thread_ended(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit):
            self.end(error)

    def end(self, error: BaseException) -> None:
        """End the process because of `error`, on any thread. Does not return."""
        if not self._lock.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process
        text = described(error)
        _log.critical("%s fails, and ends: %s", self._process, text, exc_info=error)
        teller = threading.Thread(target=self._report, args=(text,), name="atoll-last-word", daemon=True)
        teller.start()
        teller.join(_TELL_SECONDS)
        time.sleep(_LINGER_SECONDS)
        os._exit(FAILED_STATUS)

    def _report(self, text: str) -> None:
        try:
            self._tell(text)
        except Exception as error:  # the process ends anyway, and its exit status says why
            _log.error("cannot report that this process fails: %s", error)


def start_in(pool: Executor, work: Callable[..., object], *arguments: Any) -> None:
    """Run work without a result on a pool. An exception has the same effect as on a separate thread."""
    pool.submit(run_as_thread, work, *arguments)


def run_as_thread(work: Callable[..., object], *arguments: Any) -> None:
    """Run work whose future nobody reads. An exception has the same effect as on a separate thread."""
    try:
        work(*arguments)
    except BaseException:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
