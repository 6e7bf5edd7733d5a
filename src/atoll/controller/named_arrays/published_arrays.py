"""Published arrays: the requests of sessions, and the actions of the state machine `atoll.named_arrays`.

The arrays of a version belong to the *vault* of the tenant that published them: a session without a client. A session
publishes views of its arrays, so it may donate or delete the arrays themselves. When a view is computed, the vault
takes it over, and hosts share its memory with the vault.

`version_reads` has the reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from atoll.cluster.array_names import SEPARATOR, check_array_name, matches, split_name
from atoll.cluster.lifecycle import IslandDrained, IslandFailed
from atoll.cluster.tenant_settings import may_read
from atoll.controller.named_arrays.array_copies import ArrayCopies
from atoll.controller.named_arrays.array_files import ArrayFiles, file_bytes
from atoll.controller.named_arrays.vaults import Vaults
from atoll.controller.named_arrays.version_reads import VersionReads
from atoll.controller.named_arrays.version_relief import VersionRelief
from atoll.controller.state import ClusterState
from atoll.errors import OK, Code, Details, Kind, StatusError, failure, invalid, not_found
from atoll.ir.types import Opaque
from atoll.launch.launches import Launches
from atoll.migration.array_spiller import ArraySpiller
from atoll.migration.internal_programs import InternalPrograms
from atoll.named_arrays.named_arrays import (
    MAX_KEPT,
    MAX_REPLICAS,
    MAX_WAIT_SECONDS,
    Action,
    Free,
    NamedArrays,
    Opened,
    Refused,
    Restore,
    Stored,
    VersionWait,
)
from atoll.named_arrays.version_files import FileState
from atoll.named_arrays.version_records import Version, VersionKey
from atoll.named_arrays.version_states import VersionState
from atoll.protocol import messages as m
from atoll.state.buffer_states import BufferState
from atoll.state.session import Session
from atoll.state.stepped_work import Turns
from atoll.state.tenants import Tenant

# Arrays that the vault takes over in one flush. The controller needs about a millisecond for them.
_MAX_ADOPTED = 128
# Cost of the answers to `OpenVersion` in one flush, in the cost of one array of a version (about 70 ns).
_MAX_REPLIED = 1 << 14
_COST_OF_REPLY = 256
_BYTES_AS_AN_ARRAY = 256  # of the paths and the structure of a tree
_UNPUBLISHABLE = ("token", "opaque")
# Arrays of versions that begin in one flush: they are checked, or marked as published, in about a millisecond. A
# version with no more arrays begins at once.
_MAX_BEGUN = 512


class Publication(msgspec.Struct, eq=False):
    """A request to publish many arrays, which are checked, and then marked as published, over several flushes."""

    session: Session
    message: m.Publish
    checked: int = 0  # number of arrays
    nbytes: int = 0  # of the files of these arrays
    version: Version | None = None  # after the checks
    marked: int = 0  # number of arrays


class PublishedArrays:
    """Publishes arrays of sessions, and lets sessions read them.

    A version with many arrays begins over several flushes. Meanwhile, later messages of its session wait.

    A turn looks at the pending versions of sessions of whose arrays some are ready or have failed, and at some of these
    sessions only.
    """

    def __init__(
        self,
        state: ClusterState,
        vaults: Vaults,
        launches: Launches,
        internal: InternalPrograms,
        spiller: ArraySpiller,
    ) -> None:
        self._begun: Turns[Publication] = Turns()  # at most one per session
        self.begun = self._begun.waiting
        self.due = launches.buffers.settled  # sessions whose pending versions may have more arrays to take over
        self.names = NamedArrays()
        self.copies = ArrayCopies(state, self.names, vaults, launches, internal)
        self.files = ArrayFiles(
            state, self.names, self.copies, vaults, launches, spiller, self._perform, self._restored
        )
        self.more: dict[VersionKey, None] = {}  # pending versions with more arrays to take over
        self.reads = VersionReads(state, self.names, self.copies, vaults, launches, internal, self.files.restore)
        self.relief = VersionRelief(state, self.names, vaults, self.reads, self._store, self._perform)
        self.replies: deque[tuple[int, int, int]] = deque()  # to send: session, request and reader
        self._open = state.sessions
        self._outbox = state.outbox
        self._resources = state.resources
        self._reservations = launches.reservations
        self._spiller = spiller
        self._vaults = vaults
        reads = self.reads
        in_steps: tuple[Collection[Any], ...] = (
            self.begun,
            self.due,
            self.replies,
            vaults.leaving.waiting,
            self.files.due,
            reads.leaving,
            reads.ends.waiting,
            reads.starts.waiting,
        )
        # The work of the flushes. All collections are empty at nearly every flush.
        self._work = (*in_steps, *self.copies.work, reads.begun)
        # Work that the next flush continues without an event. If all collections are empty, it waits for an event.
        self.backlog = (*in_steps, self.more, self.copies.due)

    def parts(self) -> dict[str, Any]:
        """Return the parts that have state, by the names that dumps use."""
        return {
            "published arrays": self,
            "array copies": self.copies,
            "version reads": self.reads,
            "array files": self.files,
            "version relief": self.relief,
            "named arrays": self.names,
        }

    # ---- publishing

    def publish(self, session: Session, message: m.Publish) -> None:
        """Begin to publish arrays. If that is not possible, release them."""
        publication = Publication(session, message)
        try:
            self._check_request(session, message)
            if len(message.handles) > _MAX_BEGUN:
                session.in_steps += 1
                self._begun.add(session.number, session.tenant.name, publication)
                return
            self._check_arrays(publication, len(message.handles))
            self._begin(publication)
        except StatusError as error:
            self._refuse(session, message, error)
            return
        self._mark(publication, len(message.handles))
        self._have_begun(publication)

    def _refuse(self, session: Session, message: m.Publish, error: StatusError) -> None:
        session.tenant.count_rejected_publication()
        entries = session.directory.entries
        own = [each for each in message.handles if each in entries and not entries[each].is_published]
        self._vaults.release(session, own)
        self._outbox.to_session(session.number, m.Published(message.request, error.status))

    def _check_request(self, session: Session, message: m.Publish) -> None:
        name = check_array_name(message.name)
        tenant = session.tenant
        if not matches(tenant.settings.publish, name):
            allowed = ", ".join(tenant.settings.publish) or "nothing"
            text = f"tenant {tenant.name} may not publish {name}: its setting `publish` allows {allowed}"
            raise StatusError(Code.PERMISSION_DENIED, text)
        if not 1 <= message.keep <= MAX_KEPT:
            raise invalid(f"a name can keep 1 to {MAX_KEPT} versions, not {message.keep}")
        self._check_replicas(session, message.replicas)

    def _check_arrays(self, publication: Publication, limit: int) -> None:
        """Check some more of the arrays."""
        session, message, first = publication.session, publication.message, publication.checked
        entries, some = session.directory.entries, slice(first, first + limit)
        for handle, path in zip(message.handles[some], message.paths[some], strict=True):
            problem = session.directory.problem(handle)
            if problem is not None:
                text = f"array {path} of {message.name}: {problem.message}"
                raise StatusError(Code(problem.code), text, problem.payloads)
            entry = entries[handle]
            spec = entry.spec
            if message.on_disk and spec is not None and isinstance(spec.sharding.tiling, Opaque):
                text = f"array {path} of {message.name} cannot be in files"
                raise invalid(f"{text}, since the positions of its shards are unknown")
            if spec is None or not spec.sharding.devices or spec.dtype in _UNPUBLISHABLE or entry.is_published:
                raise invalid(f"array {path} of {message.name} cannot be published")
            if message.on_disk:
                publication.nbytes += file_bytes(spec)
        publication.checked = min(first + limit, len(message.handles))

    def _begin(self, publication: Publication) -> None:
        """Begin the version, whose arrays are checked."""
        session, message = publication.session, publication.message
        if message.on_disk:
            self.files.check_quota(session.tenant, publication.nbytes)
        version = publication.version = self.names.publish(
            self._outbox.seconds,
            session.tenant.name,
            message.name,
            session.number,
            keep=message.keep,
            handles=message.handles,
            paths=message.paths,
            structure=message.structure,
            replicas=message.replicas,
            on_disk=message.on_disk,
        )
        session.publishing += 1
        if version.files is not None:
            version.files.expected = publication.nbytes
            self.files.published(session)

    def _mark(self, publication: Publication, limit: int) -> None:
        """Mark some more of the arrays as published."""
        entries, first = publication.session.directory.entries, publication.marked
        for handle in publication.message.handles[first : first + limit]:
            entry = entries.get(handle)
            if entry is not None:
                self._reservations.publish(entry)
        publication.marked = min(first + limit, len(publication.message.handles))

    def _have_begun(self, publication: Publication) -> None:
        session, version = publication.session, publication.version
        assert version is not None
        self.due[session.number] = None
        self._outbox.to_session(session.number, m.Published(publication.message.request, OK, version.number))

    def _proceed_publications(self) -> None:
        """Check, or mark, more of the arrays of a publication with many."""
        number = self._begun.next()
        if number is None:
            return
        publication = self.begun[number][0]
        try:
            is_over = self._proceed_publication(publication)
        except StatusError as error:
            self._refuse(publication.session, publication.message, error)
            is_over = True
        if is_over:
            self._begun.take(number)
            publication.session.in_steps -= 1

    def _proceed_publication(self, publication: Publication) -> bool:
        """Do a step of a publication. Return whether it was the last one. Raise StatusError if it fails."""
        count, version = len(publication.message.handles), publication.version
        if publication.checked < count:
            self._check_arrays(publication, _MAX_BEGUN)
        elif version is None:
            self._begin(publication)
        elif version.state is VersionState.PENDING and publication.marked < count:
            self._mark(publication, _MAX_BEGUN)
        else:
            self._have_begun(publication)
            return True
        return False

    def _is_beginning(self, version: Version) -> bool:
        """Return whether some of the version's arrays are not marked as published yet."""
        begun = self.begun.get(version.session)
        return begun is not None and begun[0].version is version

    def _check_replicas(self, session: Session, replicas: int) -> None:
        """Raise INVALID_ARGUMENT for a number of copies that the cluster can never have."""
        if not 1 <= replicas <= MAX_REPLICAS:
            raise invalid(f"a version can have 1 to {MAX_REPLICAS} replicas, not {replicas}")
        shapes = self._resources.topology.shapes
        islands = [number for number, each in self._resources.islands.items() if not each.is_over]
        count = sum(shapes[number].platform == session.platform for number in islands)
        if replicas > max(1, count):
            raise invalid(f"{replicas} replicas need as many islands, and the cluster has {count}")

    def proceed(self) -> None:
        """Take over arrays of pending versions that are complete, complete the versions, and answer requests."""
        if not any(self._work):
            self._vaults.proceed()
            return
        if self.begun:
            self._proceed_publications()
        if self.due:
            self._take_over()
        self._vaults.proceed()
        self.copies.proceed()
        self.files.proceed()
        self.reads.proceed()
        while self.reads.begun:
            self._perform(self.names.begin_read(self.reads.begun.popleft()))
        left = _MAX_REPLIED
        while self.replies and left > 0:
            left -= self._reply(*self.replies.popleft())

    def _take_over(self) -> None:
        """Take over arrays that are complete, of some sessions. The others follow in later flushes."""
        left = _MAX_ADOPTED
        while self.due and left > 0:
            number = next(iter(self.due))
            del self.due[number]
            for version in list(self.names.pending_of.get(number, {}).values()):
                left -= 1 + self._take_over_of(version, left)
                if left <= 0:
                    self.due[number] = None
                    break

    def _take_over_of(self, version: Version, limit: int) -> int:
        """Take over the next arrays of a version, and complete it if these are the last. Return their number."""
        if self._is_beginning(version):
            return 0
        session = self._open[version.session]
        try:
            count = self._adopt(session, version, limit)
        except StatusError as error:
            self._perform(self.names.fail(version, error.status))
            return 0
        if len(version.held) == len(version.handles):
            session.publishing -= 1
            self._perform(self.names.complete(self._outbox.seconds, version))
            if version.state is VersionState.FREED:  # newer ones are complete
                return count
            if version.replicas > 1:
                self.copies.examine(version)
            if version.files is not None:
                self.files.write(version)
        return count

    def _look_at_all(self) -> None:
        """Look at all pending versions soon: their arrays may have changed otherwise than by the ends of launches."""
        self.due.update(dict.fromkeys(self.names.pending_of))

    def _adopt(self, session: Session, version: Version, limit: int) -> int:
        """Let the vault take over the next arrays of the version that are complete. Return their number.

        Raises the error of an array that failed.
        """
        first = len(version.held)
        problem: StatusError | None = None
        complete: list[int] = []
        some = slice(first, first + limit)
        for handle, path in zip(version.handles[some], version.paths[some], strict=True):
            try:
                is_complete = self._is_complete(session, handle, f"array {path} of {version.title}")
            except StatusError as error:
                problem = error
                break
            if not is_complete:
                break
            complete.append(handle)
        if complete:
            self._vaults.take(session, version, complete)
            if self.copies.leaving:  # the arrays may be on an island that is being drained
                self.copies.examine(version)
        if problem is not None:
            raise problem
        return len(complete)

    def _is_complete(self, session: Session, handle: int, what: str) -> bool:
        """Return whether an array is on devices. Raises its error, or INVALID_ARGUMENT if its session has used it."""
        entry = session.directory.entries.get(handle)
        if entry is not None and not entry.is_published:  # it was released, and its handle is another array's
            entry = None
        if entry is not None and entry.error is not None:
            text = f"{what} failed: {entry.error.message}"
            raise StatusError(Code(entry.error.code), text, entry.error.payloads)
        if entry is not None and entry.state is BufferState.SPILLED:
            self._spiller.restore(session, [handle])
        if entry is not None and entry.state is BufferState.PENDING:
            return False
        if entry is None or not entry.is_idle or entry.waits is not None:  # only a faulty proxy uses the array
            raise invalid(f"{what} is used by its session")
        return True

    # ---- reading

    def open_version(self, session: Session, message: m.OpenVersion) -> None:
        """Give the session a reader of a version, or report that it is in files, now or when that is so."""
        now = self._outbox.seconds
        try:
            owner, name = split_name(message.name, session.tenant.name)
            self._check_may_read(session.tenant, owner, name)
        except StatusError as error:
            self._outbox.to_session(session.number, m.VersionOpened(message.request, error.status))
            return
        until = now + min(message.seconds, MAX_WAIT_SECONDS)
        is_guest = owner != session.tenant.name
        wait = VersionWait(
            session.number,
            message.request,
            owner,
            name,
            message.number,
            message.newer_than,
            until,
            is_guest,
            message.in_files,
        )
        self._perform(self.names.open(now, wait))

    def _check_may_read(self, tenant: Tenant, owner: str, name: str) -> None:
        if not may_read(tenant.settings, owner, name):
            whole = f"{owner}{SEPARATOR}{name}"
            text = f"tenant {tenant.name} may not read {whole}: no pattern of its setting `subscribe` matches it"
            raise StatusError(Code.PERMISSION_DENIED, text)

    def close_version(self, session: Session, message: m.CloseVersion) -> None:
        self._perform(self.names.close_reader(session.number, message.reader))

    # ---- the end

    def remove(self, tenant: str, name: str, number: int = -1) -> str:
        """Remove a version, or all versions of a name. Return a sentence about it. Raise NOT_FOUND."""
        self._perform(self.names.remove(self._outbox.seconds, tenant, name, number))
        whole = f"{tenant}{SEPARATOR}{name}"
        return f"version {number} of {whole} was removed" if number >= 0 else f"all versions of {whole} were removed"

    def tick(self, now: float) -> None:
        self._look_at_all()
        self._perform(self.names.tick(now))
        self.copies.tick(now)
        self.reads.tick(now)
        self.files.tick(now)
        self.relief.tick(now)

    def session_closed(self, session: Session) -> None:
        """End the session's readers and pending versions, or forget everything in a vault."""
        self.reads.session_closed(session)
        self._begun.remove(session.number)
        if session.is_vault:
            for version in self.names.versions():
                if version.tenant == session.tenant.name:
                    self.files.forget(version)
            self._perform(self.names.tenant_removed(session.tenant.name))
            self.reads.tenant_removed(session.tenant.name)
        else:
            self._perform(self.names.session_closed(session.number))

    def island_failed(self, lost: IslandFailed) -> None:
        """Handle the loss of the parts of versions that were on the island. Follows the loss of all arrays there."""
        self._lose(lost.island, f"failed: {lost.status.message}")

    def island_drained(self, drained: IslandDrained) -> None:
        """Handle the loss of the parts of versions on an island whose operator has drained it."""
        self._lose(drained.island, "was drained")

    def _lose(self, island: int, what: str) -> None:
        self._look_at_all()
        self.reads.island_failed(island)
        for version in self.copies.island_lost(island):
            if version.files is not None and version.files.state is FileState.WRITTEN:
                self._store(version)
                continue
            text = f"a part of {version.title} was on island {island}, which {what}"
            details = Details(Kind.ISLAND, (island,), retriable=True)
            self._perform(self.names.lose(version, failure(Code.DATA_LOSS, text, details)))
            self._vaults.free(version)
            self.reads.version_over(version.key)
            self.files.forget(version)

    def _store(self, version: Version) -> None:
        """Free the arrays of a version that is in files. The version stays."""
        self.copies.forget(version)
        self._vaults.store(version)
        self._perform(self.names.store(version))

    def _restored(self, version: Version) -> None:
        """Handle that the arrays of a version are on devices again, or could not be restored."""
        self.reads.restored(version)
        if version.is_on_devices and version.replicas > 1:
            self.copies.examine(version)

    # ---- actions

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Free(version=version):
                    self._free(version)
                case Restore(version=version):
                    self.files.restore(version)
                case Refused(session=session, request=request, status=status):
                    self._outbox.to_session(session, m.VersionOpened(request, status))
                case Stored(session=session, request=request, version=version):
                    self._outbox.to_session(session, m.VersionOpened(request, OK, -1, version.number))
                case Opened(session=session, request=request, reader=reader):
                    self.replies.append((session, request, reader))

    def _reply(self, session: int, request: int, reader: int) -> int:
        """Answer a request with the version that it has opened. Return the cost of the answer."""
        _, version = self.names.readers.get(reader, (-1, None))
        if version is None:  # its tenant was removed, or the session has ended
            gone = not_found("the version was removed").status
            self._outbox.to_session(session, m.VersionOpened(request, gone))
            return _COST_OF_REPLY
        arrays = tuple(
            m.VersionArray(path, each.spec.dtype, each.spec.shape)
            for path, each in zip(version.paths, version.arrays, strict=True)
        )
        reply = m.VersionOpened(request, OK, reader, version.number, arrays, version.structure)
        self._outbox.to_session(session, reply)
        return _COST_OF_REPLY + len(arrays) + version.described // _BYTES_AS_AN_ARRAY

    def _free(self, version: Version) -> None:
        session = self._open.get(version.session)
        left = version.handles[len(version.held) :] if version.state is VersionState.FAILED else ()
        if session is not None and left:
            session.publishing -= 1
            self._vaults.release(session, left)
        self._vaults.free(version)
        self.reads.version_over(version.key)
        self.files.forget(version)
