"""End a process at the first bug: an exception that no code handles, on any thread. The process reports it first.

A bug that is only logged becomes a hang: another process waits for the result. So no thread of a worker has a
catch-all. `BugTrap.watch_threads` covers all threads; work on a pool, whose futures keep exceptions to
themselves, is covered if it is started by `start_in`, or if somebody waits for its future.
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
_MOST_CHARACTERS = 400
# For the report to leave, if the peer reads: the process ends in any case.
_TELL_SECONDS = 2.0
# A socket that is closed with unread input may discard what it has sent.
_LINGER_SECONDS = 0.1


def described(error: BaseException) -> str:
    """Return one line about `error` for people: "TypeError: not callable (worker/completion_reporter.py:42)".

    The place is the innermost one in Atoll.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.filename.startswith(_PACKAGE) and frame.filename != __file__]
    place = f" ({places[-1].filename.removeprefix(_PACKAGE)}:{places[-1].lineno})" if places else ""
    text = " ".join(str(error).split())
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}..."
    return f"{type(error).__name__}{text and f': {text}'}{place}"


class BugTrap:
    """Ends this process with `FAILED_STATUS` at the first bug. `tell(text)` reports it to others, on a thread of its
    own, and may block: the process ends a bounded time later.
    """

    def __init__(self, who: str, tell: Callable[[str], None] = lambda text: None) -> None:
        self._who = who
        self._tell = tell
        self._lock = threading.Lock()

    def watch_threads(self) -> None:
        """Ends the process if a thread ends by an exception, from now on."""
        threading.excepthook = self._thread_ended

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the process if a callback or a task of the loop raises an exception that is not a connection's."""
        loop.set_exception_handler(self._loop_failed)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_of_connection = "transport" in context or "protocol" in context  # which the loop has closed
        if error is None or is_of_connection or isinstance(error, OSError | AtollError | SystemExit):
            loop.default_exception_handler(context)
        else:
            self.end(error)

    def _thread_ended(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is not None and not isinstance(error, SystemExit):
            self.end(error)

    def end(self, error: BaseException) -> None:
        """End the process because of `error`. Does not return. Any thread."""
        if not self._lock.acquire(blocking=False):
            threading.Event().wait()  # another thread ends the process
        text = described(error)
        _log.critical("%s fails, and ends: %s", self._who, text, exc_info=error)
        teller = threading.Thread(target=self._report, args=(text,), name="atoll-last-word", daemon=True)
        teller.start()
        teller.join(_TELL_SECONDS)
        time.sleep(_LINGER_SECONDS)
        os._exit(FAILED_STATUS)

    def _report(self, text: str) -> None:
        try:
            self._tell(text)
        except Exception as error:  # the process ends all the same, and its exit status says why
            _log.error("that this process fails cannot be reported: %s", error)


def start_in(pool: Executor, work: Callable[..., object], *arguments: Any) -> None:
    """Run work whose result nobody reads. An exception has the same effect as on a separate thread."""
    pool.submit(_run, work, arguments)


def _run(work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    try:
        work(*arguments)
    except BaseException:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
