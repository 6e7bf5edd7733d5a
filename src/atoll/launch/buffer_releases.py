"""Free the memory of buffers, and answer the waits for them.

The memory of a buffer may be freed when the client has released it and the last gang that needs it has started.
Messages to a host arrive in order, so a `Free` that is sent then arrives after the last use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from atoll.errors import Status
from atoll.launch.reservations import Reservations
from atoll.launch.shared_state import LaunchServices, SharedState
from atoll.protocol import messages as m
from atoll.state.buffer_directory import Entry
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Session


class BufferReleases:
    """Releases, deletes, and settles the buffers of sessions."""

    def __init__(
        self,
        shared: SharedState,
        reservations: Reservations,
        services: LaunchServices,
    ) -> None:
        self._memory = reservations
        self._outbox = shared.outbox
        self._services = services
        # Sessions that publish arrays, and of whose arrays some are ready or have failed: see `PublishedArrays`.
        self.settled: dict[int, None] = {}

    def release(self, session: Session, handles: tuple[int, ...], delete: bool) -> None:
        """Release handles that the client does not need any more. With `delete`, other arrays lose the memory too."""
        if not delete:
            freed = session.directory.release_all(handles)
            if freed:
                self._free_all(session, freed)
            return
        for handle in handles:
            entry = session.directory.entries.get(handle)
            if entry is not None:
                entry.delete()
                if entry.uses <= 0:
                    self._free(session, handle, entry, delete=True)

    def drop_uses(self, session: Session, gang: Gang[GangRun]) -> None:
        """Drop a use of each of the gang's buffers. The gang has started, or never will."""
        handles = gang.run.launch.handles
        self.unuse(session, [handles[position] for position in gang.run.spec.handles])

    def unuse(self, session: Session, handles: Sequence[int]) -> None:
        """Drop one use of each of these handles, and free those without further uses."""
        freed, deleted = session.directory.unneeded(handles)
        if freed:
            self._free_all(session, freed)
        for handle, entry in deleted:
            is_released = session.directory.collect(handle, entry) is not None
            self._free(session, handle, entry, delete=True)
            if is_released:
                self._free(session, handle, entry)

    def wait(self, session: Session, number: int, handles: tuple[int, ...]) -> None:
        """Answer the wait `number` when all of these buffers are ready, or have failed."""
        status = session.directory.wait(number, handles)
        if status is not None:
            self._outbox.to_session(session.number, m.Awaited(number, status))

    def launched(self, session: Session, message: m.Launch) -> None:
        """Do what a launch message asks for once its launch is in line, or was refused."""
        if message.wait:
            self.wait(session, message.wait, message.results)
            self.release(session, message.results, delete=False)
        if message.released:
            self.release(session, message.released, delete=False)

    def fail(self, session: Session, handles: tuple[int, ...], error: Status) -> None:
        """Refuse pending buffers of a failed launch to new launches."""
        session.directory.fail(handles, error)
        if session.publishing:
            self.settled[session.number] = None

    def settle(self, session: Session, handle: int, error: Status | None) -> None:
        """Answer the waits for a buffer that is ready, or that has failed with `error`."""
        if session.publishing:
            self.settled[session.number] = None
        for wait, status in session.directory.settle(handle, error):
            self._outbox.to_session(session.number, m.Awaited(wait, status))

    def settle_all(self, session: Session, handles: Sequence[int], error: Status | None) -> None:
        """Do the same for all results of a launch."""
        if session.publishing and handles:
            self.settled[session.number] = None
        for handle in handles if error is not None else session.directory.make_ready(handles):
            self.settle(session, handle, error)

    def free_errors(self, session: Session, errors: Iterable[tuple[int, Entry]], lost: Collection[int] = ()) -> None:
        """Have hosts forget buffers that have become errors, by handle, without waiting for the client to release them.

        The ledger counts the memory of these buffers as free, although hosts may have parts. Hosts in `lost` have none.
        """
        by_hosts: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # by identity, which is faster than the hash
        for handle, entry in errors:
            if entry.released and entry.uses <= 0:
                continue  # freed already, and only here for the waits for it
            by_hosts.setdefault(id(entry.hosts), (entry.hosts, []))[1].append(handle)
            entry.hosts = ()
        for hosts, handles in by_hosts.values():
            left = tuple([host for host in hosts if host not in lost])
            if left:
                self._outbox.free(left, session.number, handles)

    def _free_all(self, session: Session, freed: Sequence[tuple[int, Entry]]) -> None:
        """Free buffers that nothing needs, with few calls per buffer, since scripts drop trees of many arrays."""
        if len(freed) < 2 or any([entry.spilled is not None for _, entry in freed]):
            for handle, entry in freed:
                self._free(session, handle, entry)
            return
        self._memory.release_all([entry for _, entry in freed])
        by_hosts: dict[tuple[int, ...], list[int]] = {}
        for handle, entry in freed:
            by_hosts.setdefault(entry.hosts, []).append(handle)
        for hosts, some in by_hosts.items():
            self._outbox.free(hosts, session.number, some)

    def _free(self, session: Session, handle: int, entry: Entry, delete: bool = False) -> None:
        self._memory.release(entry)
        if entry.spilled is not None:
            self._services.drop_spilled(session, entry.spilled)
            entry.spilled = None
        self._outbox.free(entry.hosts, session.number, (handle,), delete=delete)
