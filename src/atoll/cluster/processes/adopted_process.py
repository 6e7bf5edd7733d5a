"""A process that outlives its holder for a while, so that another process can adopt it.

The holder of a process is named in a file that both know. Holders need not be related.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.processes.child import END_SECONDS
from atoll.cluster.processes.lifeline import open_pid, watch_in_loop
from atoll.cluster.processes.process_table import began
from atoll.decodable import decodable
from atoll.missing import read_if_exists
from atoll.retries import Reasons, Retry

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25


class ProcessId(msgspec.Struct, frozen=True):
    """Identifies a process of this machine. The kernel reuses pids, so the start time is part of it."""

    pid: int
    began: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        return cls(pid, began(pid) or 0)

    @property
    def runs(self) -> bool:
        """Whether the process runs. Raises OSError if that is unknown."""
        return began(self.pid) == self.began


class PidFile(msgspec.Struct, frozen=True):
    """The content of the file that names a process, its holder, and the `directory` of the process."""

    held: ProcessId
    holder: ProcessId
    directory: str = ""

    @classmethod
    def read(cls, path: Path) -> PidFile | None:
        """Return the content of the file at `path`, or None if there is no such file or its content is invalid.

        Raise OSError if it cannot be read.
        """
        content = read_if_exists(path)
        try:
            return None if content is None else msgspec.json.decode(content, type=decodable(cls))
        except msgspec.MsgspecError:
            return None

    def write(self, path: Path) -> None:
        """Write the file atomically. Raise OSError."""
        write_atomically(path, msgspec.json.encode(self))


def watch_holder(pid: int, path: Path, seconds: float, on_end: Callable[[], None]) -> None:
    """Call `on_end` on the running loop if process `pid` ends and the file names no other holder within `seconds`.

    If the file names another holder, watch that one from then on. While it is unknown whether another process holds
    this one, do not call `on_end`.
    """
    loop = asyncio.get_running_loop()
    unknown = Reasons(_log)

    def look(until: float) -> None:
        try:
            note = PidFile.read(path)
            is_held = note is not None and note.held.pid == os.getpid() and note.holder.runs
        except OSError as error:
            unknown.log(f"cannot find out which process holds this one, will retry: {error}")
            loop.call_later(_LOOK_SECONDS, look, until)
            return
        if is_held and note is not None:
            watch_holder(note.holder.pid, path, seconds, on_end)
        elif loop.time() > until:
            on_end()
        else:
            loop.call_later(_LOOK_SECONDS, look, until)

    watch_in_loop(pid, lambda: look(loop.time() + seconds))


class AdoptedProcess:
    """A process that another process has started and that this one now holds. Methods may be called on any thread."""

    def __init__(self, process: ProcessId) -> None:
        self._process = process

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the process has ended, or for `seconds`. Return whether it is known to have ended."""
        retry = Retry(_LOOK_SECONDS, patience=math.inf if seconds is None else seconds)
        try:
            descriptor = retry.call(lambda: open_pid(self._process.pid) if self._process.runs else None, OSError)
        except OSError:  # this process has too many open files
            return False
        if descriptor is None:
            return True
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            return bool(poller.poll(None if seconds is None else 1000 * seconds))
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """End the process, with SIGKILL if it does not end within a few seconds.

        Raise OSError if it is unknown whether the process still has its pid.
        """
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self._process.runs:
                    os.kill(self._process.pid, number)
                if self.wait(END_SECONDS):
                    return
