"""Records profiles of this process for one session at a time, because XLA has one profiler per process.

A profile belongs to the session that started it. Recording ends at the session's request, with the session, after the
requested time, or when memory is short. The result is kept until the session collects it.

Invariant: a profile contains no names of other sessions' programs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from atoll.cluster.processes.bugs import start_in
from atoll.cluster.processes.process_table import has_memory_for
from atoll.errors import OK, Code, Status, StatusError, not_found, status_of, unimplemented
from atoll.host_services.calls.call_messages import packed
from atoll.host_services.calls.client_calls import Calls
from atoll.host_services.profiles.xspace import Others, hide
from atoll.protocol import profiles as p

_log = logging.getLogger(__name__)

_PART_BYTES = 4 << 20
# Interval between checks of the available memory.
_LOOK_SECONDS = 1.0

# Ends a recording and returns an XSpace.
End = Callable[[], bytes]
# Hands a profile over. It may wait for a client or for a store.
HandOver = Callable[[], None]


def is_memory_short() -> bool:
    """Return whether this machine's memory is nearly exhausted."""
    return not has_memory_for(0)


class _Profile:
    """A profile that is being recorded or that waits for collection."""

    def __init__(self, session: int, end: End) -> None:
        self.session = session
        self.began = time.monotonic()
        self.end: End | None = end
        self.content = b""
        self.ended = threading.Event()


class ProfileRecorder:
    """Records and hands over profiles. Thread-safe.

    `begin` starts a recording and returns the function that ends it. `others_programs(session)` returns the programs
    that the session must not see.
    """

    def __init__(
        self,
        begin: Callable[[p.Recording], End],
        others_programs: Callable[[int], Others],
        calls: Calls | None,
        host: int,
        is_memory_short: Callable[[], bool] = is_memory_short,
    ) -> None:
        self._begin = begin
        self._others_programs = others_programs
        self._calls = calls
        self._host = host
        self._is_memory_short = is_memory_short
        self._lock = threading.Lock()  # held while XLA starts or ends its profiler
        self._profile: _Profile | None = None
        self._handing_over: set[int] = set()  # sessions that receive a profile, which must not start another one
        self._thread = ThreadPoolExecutor(1, "atoll-profile")
        self._has_requests = False

    def submit(self, session: int, payload: bytes, then: Callable[[Status], None]) -> None:
        """Handle a session's request on another thread, and call `then` there. Does not block."""
        self._has_requests = True
        start_in(self._thread, self._handle, session, payload, then)

    def _handle(self, session: int, payload: bytes, then: Callable[[Status], None]) -> None:
        def run(work: Callable[[], HandOver | None]) -> HandOver | None:
            try:
                left = work()
            except Exception as error:
                then(status_of(error))
                return None
            if left is None:
                then(OK)
            return left

        hand_over = run(lambda: self.handle(session, payload))
        if hand_over is not None:
            threading.Thread(target=run, args=(hand_over,), name="atoll-profile-out", daemon=True).start()

    def handle(self, session: int, payload: bytes) -> HandOver | None:
        """Handle a session's request. Return a function that hands the profile over, if it was collected.

        Blocks while XLA starts or ends its profiler. Raises StatusError and XLA's errors. The returned function may
        block, and also raises OSError.
        """
        match p.decode(payload):
            case p.Start(recording=recording):
                self._start(session, recording)
            case p.Stop():
                with self._lock:
                    self._finish(self._of(session))
            case p.Collect(callback=callback, directory=directory):
                with self._lock:
                    profile = self._of(session)
                    self._profile = None
                    self._finish(profile)
                    if not (callback or directory):
                        return None
                    self._handing_over.add(session)
                return lambda: self._hand_over(session, profile.content, callback, directory)
        return None

    def close(self, session: int) -> None:
        """Drop the profile of a session that has ended, after its earlier requests. Does not block.

        Call it on the thread that calls `submit`.
        """
        if self._has_requests or self._profile is not None:  # otherwise each of many hosts would start its thread
            start_in(self._thread, self._drop, session)

    # ---- recording

    def _start(self, session: int, recording: p.Recording) -> None:
        with self._lock:
            running = self._profile
            if session in self._handing_over:
                raise StatusError(
                    Code.FAILED_PRECONDITION, f"host {self._host} is still handing over this session's last profile"
                )
            if running is not None and (running.session != session or running.end is not None):
                whose = "this session" if running.session == session else "another session"
                raise StatusError(
                    Code.FAILED_PRECONDITION,
                    f"host {self._host} has been recording a profile of {whose} for "
                    f"{time.monotonic() - running.began:.0f} s, and records one at a time: try again later",
                )
            profile = self._profile = _Profile(session, self._begin(recording))
        watch = threading.Thread(
            target=self._watch, args=(profile, recording.seconds), name="atoll-profile-end", daemon=True
        )
        watch.start()

    def _of(self, session: int) -> _Profile:
        if self._profile is None or self._profile.session != session:
            raise not_found(f"host {self._host} has no profile of this session: it was not started, or was lost")
        return self._profile

    def _finish(self, profile: _Profile) -> None:
        """End a recording. The caller holds the lock."""
        profile.ended.set()
        end, profile.end = profile.end, None
        if end is not None:
            profile.content = end()

    def _watch(self, profile: _Profile, seconds: float) -> None:
        """End a recording after its time, or when this machine's memory is short."""
        reason = ""
        while not profile.ended.wait(min(_LOOK_SECONDS, max(0.0, profile.began + seconds - time.monotonic()))):
            if time.monotonic() >= profile.began + seconds:
                reason = f"{seconds:.0f} s have passed"
            elif self._is_memory_short():
                reason = "this machine's memory is short"
            if not reason:
                continue
            with self._lock, contextlib.suppress(Exception):
                if self._profile is profile and profile.end is not None:
                    _log.warning("ending the profile of session %d: %s", profile.session, reason)
                    self._finish(profile)
            return

    def _drop(self, session: int) -> None:
        with self._lock:
            profile = self._profile
            if profile is not None and profile.session == session:
                self._profile = None
                with contextlib.suppress(Exception):
                    self._finish(profile)

    # ---- handing over

    def _hand_over(self, session: int, recorded: bytes, callback: int, directory: str) -> None:
        try:
            if len(recorded) > p.MAX_BYTES:
                raise StatusError(
                    Code.RESOURCE_EXHAUSTED,
                    f"host {self._host} has recorded {len(recorded):,} bytes, but a profile may have {p.MAX_BYTES:,}: "
                    "record for a shorter time, or with a lower host_tracer_level",
                )
            content = hide(recorded, self._others_programs(session))
            if callback:
                self._send(session, callback, content)
            else:
                write(directory, p.file_name(self._host), content)
        finally:
            self._handing_over.discard(session)

    def _send(self, session: int, callback: int, content: bytes) -> None:
        if self._calls is None:
            raise unimplemented("this host has no channels to its sessions' clients")
        view = memoryview(content)
        for offset in range(0, max(1, view.nbytes), _PART_BYTES):
            part = np.frombuffer(view[offset : offset + _PART_BYTES], np.uint8)
            head = np.array([self._host, offset, view.nbytes], np.int64)
            self._calls.call(session, callback, *packed([head, part])).done()


def write(directory: str, name: str, content: bytes) -> None:
    """Write a new file. Raise OSError, or UNIMPLEMENTED if this host cannot reach the URL `directory`.

    `directory` is a path on this host, or a URL of an object store that fsspec supports.
    """
    if "://" in directory:
        _write_to_store(f"{directory}/{name}", content)
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    path = os.path.join(directory, name)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _write_to_store(url: str, content: bytes) -> None:
    try:
        import fsspec

        opened: Any = fsspec.open(url, "wb")
    except ImportError as error:
        raise unimplemented(
            f"this host cannot write {url[:300]}: {error}. Install fsspec and the package for this URL on the host"
        ) from None
    with opened as file:
        file.write(content)
