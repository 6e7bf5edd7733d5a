"""The shared libraries of a client, which its session sends to the hosts that compile programs with their handlers.

To the cluster, a library is a function that is never called: it has the same way to the hosts as a program, returns to
restarted hosts, and migrates with its devices.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from atoll.errors import Code, StatusError, not_found
from atoll.executables.loaded_executable import ImmediateReply
from atoll.protocol.ffi_libraries import check_library_size, library_hash
from atoll.protocol.messages import FunctionSource, LibraryTarget
from atoll.session.cluster_session import ClusterSession

# Libraries of a client, and their bytes.
MAX_LIBRARIES = 128
MAX_BYTES = 2 << 30


class SessionLibraries:
    """The libraries that a client has sent, by hash. They stay until the session ends."""

    def __init__(self, cluster: ClusterSession) -> None:
        self._cluster = cluster
        self._sources: dict[str, tuple[bytes, str]] = {}  # encoded, and the hash of that
        self._loaded: dict[str, set[int]] = {}  # devices whose hosts have the library, also after they have migrated
        self._lock = asyncio.Lock()

    async def add(self, content: bytes) -> ImmediateReply:
        """Store a library. The fingerprint of the reply is its hash. Raise RESOURCE_EXHAUSTED."""
        check_library_size(len(content))
        digest = await asyncio.to_thread(library_hash, content)
        if digest not in self._sources:
            used = sum(len(source) for source, _ in self._sources.values())
            if len(self._sources) >= MAX_LIBRARIES or used + len(content) > MAX_BYTES:
                raise StatusError(
                    Code.RESOURCE_EXHAUSTED,
                    f"this script has sent {len(self._sources)} FFI libraries of {used} bytes: the limit is "
                    f"{MAX_LIBRARIES} libraries and {MAX_BYTES} bytes",
                )
            self._sources[digest] = await asyncio.to_thread(_encoded, content)
        return ImmediateReply("an FFI library", (0,), digest.encode())

    async def load(self, targets: Sequence[LibraryTarget], devices: Sequence[int]) -> None:
        """Load the libraries of these targets on the hosts of the devices. Raise StatusError."""
        if not targets:
            return
        async with self._lock:  # so that two programs do not send the same library
            for digest in dict.fromkeys(each.library for each in targets):
                await self._load(digest, devices)

    async def _load(self, digest: str, devices: Sequence[int]) -> None:
        if digest not in self._sources:
            raise not_found(f"this script has not sent the FFI library {digest[:12]}")
        loaded = self._loaded.setdefault(digest, set())
        for group in self._missing(devices, loaded):
            await self._cluster.register_function(*self._sources[digest], (group,))
            loaded.update(group)

    def _missing(self, devices: Sequence[int], loaded: set[int]) -> Iterable[tuple[int, ...]]:
        """Yield groups of devices, one per host, whose hosts lack a library.

        A group has all devices on its host that the session had when it began, because they migrate together, or the
        given devices of its slice.
        """
        first = {each.id for each in self._cluster.welcome.devices}
        for host in self._cluster.hosts_of([each for each in devices if each not in loaded]):
            here = set(self._cluster.devices_of(host))
            missing = here.intersection(devices) - loaded
            yield tuple(sorted(missing | (here & first - loaded) if missing & first else missing))


def _encoded(content: bytes) -> tuple[bytes, str]:
    source = msgspec.msgpack.encode(FunctionSource(content, b"", is_library=True))
    return source, hashlib.sha256(source).hexdigest()
