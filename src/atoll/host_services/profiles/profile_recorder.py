"""Records what this process does, for one session at a time: XLA has one profiler a process.

A profile is the session's that started it. It ends when the session says so, with the session, and after its seconds;
what was recorded stays until it is collected. Invariant: other sessions' programs have no names in it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from atoll.cluster.processes.bugs import start_in
from atoll.cluster.processes.memory import has_memory_for
from atoll.errors import OK, Code, Status, StatusError, not_found, status_of, unimplemented
from atoll.host_services.calls.call_arrays import packed
from atoll.host_services.calls.client_calls import Calls
from atoll.host_services.profiles.profile_files import write
from atoll.host_services.profiles.xspace import Others, hide
from atoll.protocol import profiles as p

_log = logging.getLogger(__name__)

_PART_BYTES = 4 << 20
# How often it is looked whether there is memory left.
_LOOK_SECONDS = 1.0

# Ends the recording, and gives an XSpace.
End = Callable[[], bytes]
# What remains to be done, and may wait for a client, or for a store.
HandOver = Callable[[], None]


def is_memory_short() -> bool:
    """Whether this machine has hardly any memory left for anybody."""
    return not has_memory_for(0)


class _Profile:
    """One that is being recorded, or was, and waits to be collected."""

    def __init__(self, session: int, end: End) -> None:
        self.session = session
        self.began = time.monotonic()
        self.end: End | None = end
        self.content = b""
        self.ended = threading.Event()


class Recorder:
    """For any thread. `begin` starts to record, and gives what ends it.

    `others_programs(session)` are those that a session must not see.
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
        self._handing_over: set[int] = set()  # sessions: what one does not take, it cannot have twice
        self._thread = ThreadPoolExecutor(1, "atoll-profile")

    def submit(self, session: int, payload: bytes, then: Callable[[Status], None]) -> None:
        """Does what a session asks, and calls `then`, on another thread. Does not block."""
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
        """Does what a session asks, except what waits for others: that is returned, to be called.

        Blocks while XLA starts or ends its profiler. Raises StatusError, and what XLA raises; handing over raises
        OSError, too.
        """
        match p.decode(payload):
            case p.Start(recording=recording):
                self._start(session, recording)
            case p.Stop():
                with self._lock:
                    self._record_no_longer(self._of(session))
            case p.Collect(callback=callback, directory=directory):
                with self._lock:
                    profile = self._of(session)
                    self._profile = None
                    self._record_no_longer(profile)
                    if not (callback or directory):
                        return None
                    self._handing_over.add(session)
                return lambda: self._hand_over(session, profile.content, callback, directory)
        return None

    def close(self, session: int) -> None:
        """The session has ended. Does not block."""
        profile = self._profile
        if profile is not None and profile.session == session:
            threading.Thread(target=self._drop, args=(profile,), name="atoll-profile-end", daemon=True).start()

    # ---- recording

    def _start(self, session: int, recording: p.Recording) -> None:
        with self._lock:
            running = self._profile
            if session in self._handing_over:
                raise StatusError(
                    Code.FAILED_PRECONDITION, f"host {self._host} still hands over this session's last profile"
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
            raise not_found(f"host {self._host} records no profile of this session: it was not started, or was lost")
        return self._profile

    def _record_no_longer(self, profile: _Profile) -> None:
        """With the lock held."""
        profile.ended.set()
        end, profile.end = profile.end, None
        if end is not None:
            profile.content = end()

    def _watch(self, profile: _Profile, seconds: float) -> None:
        """Ends a recording that nobody has ended in time, or for which this machine's memory is too short."""
        reason = ""
        while not profile.ended.wait(min(_LOOK_SECONDS, max(0.0, profile.began + seconds - time.monotonic()))):
            if time.monotonic() >= profile.began + seconds:
                reason = f"it has taken {seconds:.0f} s"
            elif self._is_memory_short():
                reason = "this machine's memory is short"
            if not reason:
                continue
            with self._lock, contextlib.suppress(Exception):
                if self._profile is profile and profile.end is not None:
                    _log.warning("the profile of session %d ends: %s", profile.session, reason)
                    self._record_no_longer(profile)
            return

    def _drop(self, profile: _Profile) -> None:
        with self._lock:
            if self._profile is profile:
                self._profile = None
                with contextlib.suppress(Exception):
                    self._record_no_longer(profile)

    # ---- handing over

    def _hand_over(self, session: int, recorded: bytes, callback: int, directory: str) -> None:
        try:
            if len(recorded) > p.MAX_BYTES:
                raise StatusError(
                    Code.RESOURCE_EXHAUSTED,
                    f"host {self._host} has recorded {len(recorded):,} bytes, of which {p.MAX_BYTES:,} can be handed "
                    "over: record for a shorter time, or with a lower host_tracer_level",
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
            raise unimplemented("this host's sessions have no channel to their clients")
        view = memoryview(content)
        for offset in range(0, max(1, view.nbytes), _PART_BYTES):
            part = np.frombuffer(view[offset : offset + _PART_BYTES], np.uint8)
            head = np.array([self._host, offset, view.nbytes], np.int64)
            self._calls.call(session, callback, *packed([head, part])).done()
