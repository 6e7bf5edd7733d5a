"""Arrays that have their handles and types now, and their contents after a later launch.

The controller may have to launch more than once until the contents exist. Meanwhile launches that need the arrays are
deferred, as for control flow nodes (`launch.dependency_tracker`), and everything else continues.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import Status
from atoll.ir.types import ArraySpec
from atoll.launch.buffer_releases import BufferReleases
from atoll.launch.dependency_tracker import DependencyTracker
from atoll.launch.outbox import Outbox
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.queued_nodes import Dependency
from atoll.state.session import GangRun, Session


class DeferredResults:
    """Makes such arrays, and ends them."""

    def __init__(self, dependencies: DependencyTracker[GangRun], buffers: BufferReleases, outbox: Outbox) -> None:
        self._dependencies = dependencies
        self._buffers = buffers
        self._outbox = outbox

    def add(
        self, session: Session, handles: Sequence[int], specs: Sequence[ArraySpec], producer: str
    ) -> Dependency[GangRun]:
        """Add arrays to the session. Return the dependency that they have in common."""
        dependency = self._dependencies.undecided(session.number, ())
        for handle, spec in zip(handles, specs, strict=True):
            entry = Entry((), 0, producer=producer, spec=spec, dependency=dependency)
            entry.uses = 1  # so that it is not forgotten before `complete` or `fail`
            session.directory.add(handle, entry)
        return dependency

    def complete(
        self, session: Session, handles: Sequence[int], made: Sequence[int], dependency: Dependency[GangRun]
    ) -> None:
        """Give the arrays the memory of complete ones of the same types, whose handles end."""
        shares: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for handle, source in zip(handles, made, strict=True):
            hosts = session.directory.replace(handle, source).hosts
            shares.setdefault(hosts, []).append((source, handle))
        for hosts, pairs in shares.items():
            self._outbox.to_hosts(hosts, m.ShareBuffers(session.number, session.number, tuple(pairs)))
            self._outbox.free(hosts, session.number, [source for source, _ in pairs])
        self._end(session, handles, dependency, None)

    def fail(self, session: Session, handles: Sequence[int], dependency: Dependency[GangRun], status: Status) -> None:
        session.note_error(status)
        self._end(session, handles, dependency, status)

    def _end(
        self, session: Session, handles: Sequence[int], dependency: Dependency[GangRun], error: Status | None
    ) -> None:
        for handle in handles:
            self._buffers.settle(session, handle, error)
        self._buffers.unuse(session, handles)
        self._dependencies.resolve(dependency)

    def forget(self, dependency: Dependency[GangRun]) -> None:
        """Handle that the session of the arrays has ended."""
        self._dependencies.resolve(dependency)
