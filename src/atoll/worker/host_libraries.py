"""The shared libraries that sessions load on this host, and the programs that wait for one."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from atoll.devices.compilers.compiler_messages import RenamedTarget
from atoll.devices.device import LibraryLoader
from atoll.errors import OK, Code, Status, StatusError, unimplemented
from atoll.protocol.ffi_libraries import library_hash
from atoll.protocol.messages import Compile, LibraryTarget

# Libraries of a session on a host.
MAX_PER_SESSION = 128
# Time for which a program waits for its libraries. On a restarted host, its source may arrive before they do.
WAIT_SECONDS = 120.0

_Key = tuple[str, str]  # tenant and hash


class _Waiting:
    """A program that waits for libraries. `then` is called once. `timer` calls `time_out(self)` if they are late."""

    def __init__(
        self,
        missing: set[_Key],
        then: Callable[[Status], None],
        seconds: float,
        time_out: Callable[[_Waiting], None],
    ) -> None:
        self.missing = missing
        self.then = then
        self.timer = threading.Timer(seconds, time_out, (self,))
        self.timer.daemon = True


class HostLibraries:
    """Loads libraries for sessions whose tenant may load native code. Any thread may call the methods.

    Args:
        loader: Loads them into this process; None if the devices run no native code.
        wait_seconds: See `WAIT_SECONDS`.
    """

    def __init__(self, loader: LibraryLoader | None, wait_seconds: float = WAIT_SECONDS) -> None:
        self._loader = loader
        self._wait_seconds = wait_seconds
        self._lock = threading.Lock()
        self._loaded: set[_Key] = set()
        self._sessions: defaultdict[int, set[str]] = defaultdict(set)  # hashes
        self._waiting: list[_Waiting] = []

    def load(self, message: Compile, content: bytes) -> None:
        """Load a library for the session. Raise StatusError if that is not permitted, or not possible."""
        loader = self._permitted(message)
        digest = library_hash(content)
        with self._lock:
            own = self._sessions[message.session]
            if digest not in own and len(own) >= MAX_PER_SESSION:
                raise StatusError(
                    Code.RESOURCE_EXHAUSTED,
                    f"a session cannot load more than {MAX_PER_SESSION} FFI libraries on a host",
                )
            own.add(digest)
        status = OK
        try:
            loader.load(content, message.tenant)
        except StatusError as error:
            status = error.status
        ready = self._settle((message.tenant, digest), status)
        for then in ready:
            then(status)
        status.raise_if_error()

    def when_loaded(self, message: Compile, targets: Sequence[LibraryTarget], then: Callable[[Status], None]) -> None:
        """Call `then`, on any thread, when the libraries of `targets` are loaded or one of them cannot be loaded.

        Raise StatusError if the tenant may not load any.
        """
        self._permitted(message)
        with self._lock:
            missing = {(message.tenant, each.library) for each in targets} - self._loaded
            if missing:
                waiting = _Waiting(missing, then, self._wait_seconds, self._time_out)
                waiting.timer.start()
                self._waiting.append(waiting)
                return
        then(OK)

    def register(self, message: Compile, targets: Sequence[LibraryTarget]) -> tuple[RenamedTarget, ...]:
        """Register the targets of a program whose libraries are loaded. Raise StatusError."""
        return self._permitted(message).register(targets, message.tenant) if targets else ()

    def close(self, session: int) -> None:
        """Forget the libraries of a session. They stay in the process, and sessions of the same tenant share them."""
        with self._lock:
            self._sessions.pop(session, None)

    def _permitted(self, message: Compile) -> LibraryLoader:
        if not message.native_code:
            name = message.tenant
            raise StatusError(
                Code.PERMISSION_DENIED,
                f"the tenant {name} may not load native code, such as libraries with FFI handlers. An operator can "
                f"permit it with `native_code = true` in the file of tenants, or `atoll tenants set {name} "
                "--native-code`",
            )
        if self._loader is None:
            raise unimplemented("these devices run no native code, so they cannot load libraries with FFI handlers")
        return self._loader

    def _settle(self, key: _Key, status: Status) -> Iterable[Callable[[Status], None]]:
        """Note a library's outcome. Return what waits for it and for no other library."""
        with self._lock:
            if status.ok:
                self._loaded.add(key)
            concerned = [each for each in self._waiting if key in each.missing]
            for each in concerned:
                each.missing.discard(key)
            ready = [each for each in concerned if not each.missing or not status.ok]
            self._waiting = [each for each in self._waiting if each not in ready]
        for each in ready:
            each.timer.cancel()  # otherwise its thread would stay until the end of the time
        return [each.then for each in ready]

    def _time_out(self, waiting: _Waiting) -> None:
        with self._lock:
            if waiting not in self._waiting:
                return
            self._waiting.remove(waiting)
            missing = ", ".join(digest[:12] for _, digest in waiting.missing)
        text = f"the FFI libraries of this program ({missing}) have not arrived at the host"
        waiting.then(Status(int(Code.DEADLINE_EXCEEDED), f"{text} within {self._wait_seconds:.0f} s"))
