"""Reads of published arrays: from which copy each reader gets its arrays, and when.

`atoll.named_arrays.transfer_trees` decides. A read is a launch in the session of the reader. Hosts share the buffers of
the source with the session, and the launch transfers them to the session's devices. So the reader's tenant pays for the
transfer and for the memory. The source is the vault, or a session of the same tenant that has received these arrays and
still has them. Nothing keeps such a copy for later readers.

The arrays of the reader have their handles at once, and their contents when a launch has ended well
(`launch.deferred_results`). If the source fails before that, another launch gets them from another source. So the
arrays are whole, or errors.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import msgspec
from msgspec.structs import replace

from atoll.cluster.lifecycle import WORKING
from atoll.cluster.locations import DeviceLocation
from atoll.controller.named_arrays.array_copies import ArrayCopies
from atoll.controller.named_arrays.read_programs import ReadProgram, find_program, type_of_result
from atoll.controller.named_arrays.vaults import Vaults, spec_of
from atoll.controller.state import ClusterState
from atoll.errors import Code, Kind, Status, StatusError, invalid, not_found
from atoll.ir.types import ArraySpec
from atoll.launch.launches import Launches
from atoll.migration.internal_programs import InternalPrograms
from atoll.named_arrays.copy_rules import Islands
from atoll.named_arrays.named_arrays import GUEST_SECONDS, MAX_WAIT_SECONDS, NamedArrays
from atoll.named_arrays.transfer_trees import MAX_ROUNDS, TransferTree
from atoll.named_arrays.version_files import FileState
from atoll.named_arrays.version_records import Version, VersionKey
from atoll.protocol import messages as m
from atoll.quantities import counted
from atoll.state.buffer_directory import Entry
from atoll.state.buffer_states import BufferState
from atoll.state.queued_nodes import Dependency
from atoll.state.session import GangRun, Launch, Session
from atoll.state.stepped_work import Turns

# Reads of a session that have not ended. A read has at most `MAX_READ` arrays.
MAX_READS = 4096
# Arrays of reads that are launched or completed in one flush, and the least that a read or a choice of a source counts.
_MAX_ARRAYS = 128
_MIN_ARRAYS = 16
# Reads and copies of closed sessions that one flush forgets.
_MAX_FORGOTTEN = 128
# Transfers of a tree stall if none begins or ends for some seconds, and the time for the bytes of the version at a rate
# that is lower than that of usual networks with two readers per source.
_PATIENCE_SECONDS = 2.0
_SLOWEST = float(1 << 29)
# Parts of a version, other than the usual ones, that have trees for all sessions of a tenant. Subscribers to a version
# with checksums read such parts: the arrays without the checksums, and only the checksums.
MAX_OTHER_PARTS = 16
# Trees with waiting reads that are examined per second.
MAX_EXAMINED = 1024
# Launches of one read, of which all but the last one were interrupted.
_MAX_ATTEMPTS = 4

# The arrays of a version that a tree transfers: the first one, their number, and the tenant of the readers. If sessions
# read too many different parts, the last item is the number of the only read.
Part = tuple[int, int, str, int]
TreeKey = tuple[VersionKey, Part]


class VersionRead(msgspec.Struct, eq=False):
    """A read that has not ended, or that has received a copy that feeds others.

    Attributes:
      targets: the types of the arrays of the reader, until it has received its copy.
      results: handles of the arrays of the reader.
      islands: the islands of these arrays.
      near: the islands of which a source sends nothing: `islands` if all arrays are on the same ones, otherwise none.
      made: handles of the arrays that the present launch makes.
      senders: the islands that it transfers from, while `made` exist.
      attempts: the number of launches so far.
      is_interrupted: an island that it transfers from has failed.
    """

    number: int
    session: int
    reader: int
    version: Version
    part: Part
    targets: tuple[ArraySpec, ...]
    results: tuple[int, ...]
    dependency: Dependency[GangRun]
    islands: tuple[int, ...]
    near: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    senders: tuple[int, ...] = ()
    attempts: int = 0
    is_interrupted: bool = False

    @property
    def positions(self) -> range:
        """Return the positions of the arrays in the version."""
        return range(self.part[0], self.part[0] + self.part[1])


class _Source(msgspec.Struct, frozen=True):
    """Arrays that a read can be made from, with types that name devices by their numbers in vaults."""

    owner: Session
    arrays: Sequence[tuple[int, ArraySpec]]
    places: dict[int, DeviceLocation]


class VersionReads:
    """The reads of all sessions."""

    def __init__(
        self,
        state: ClusterState,
        names: NamedArrays,
        copies: ArrayCopies,
        vaults: Vaults,
        launches: Launches,
        internal: InternalPrograms,
        restore: Callable[[Version], None],
    ) -> None:
        self.starts: Turns[TreeKey] = Turns()  # trees in which a read may start, by the session of this read
        self.ends: Turns[tuple[int, Status | None]] = Turns()  # reads whose launch has ended, with its error
        self.begun: deque[int] = deque()  # the readers of reads that do not wait any more
        self.leaving: deque[int] = deque()  # the reads and copies of closed sessions, which flushes forget
        self.programs: dict[int, list[ReadProgram]] = {}  # by session, the last used one at the end
        self._reads: dict[int, VersionRead] = {}  # by number
        self._reads_of: dict[int, dict[int, None]] = {}  # their numbers, by open session
        self._reads_from: dict[int, dict[int, None]] = {}  # of those whose launch transfers from an island, by island
        self._received: dict[int, VersionRead] = {}  # those that have received copies that feed others
        self._copies_of: dict[int, dict[int, None]] = {}  # their numbers, by open session
        self._trees: dict[VersionKey, dict[Part, TransferTree]] = {}
        self._others: dict[tuple[VersionKey, str], dict[Part, None]] = {}  # unusual parts with trees, by tenant
        self._blocked: dict[TreeKey, None] = {}  # trees in which reads wait, the next one to examine first
        self._next = 1
        self._open = state.sessions
        self._outbox = state.outbox
        self._resources = state.resources
        self._names = names
        self._copies = copies
        self._vaults = vaults
        self._launcher = launches.launcher
        self._deferred_results, self._buffers = launches.deferred_results, launches.buffers
        self._internal = internal
        self._restore = restore

    def rebuild_tables(self) -> None:
        """Make the tables of the reads and copies of each session and island again, which are not stored."""
        self._reads_from.clear()
        for found, by_session in ((self._reads, self._reads_of), (self._received, self._copies_of)):
            by_session.clear()
            for number, read in found.items():
                if read.session in self._open:
                    by_session.setdefault(read.session, {})[number] = None
        for read in self._reads.values():
            self._note_senders(read)

    def _note_senders(self, read: VersionRead) -> None:
        if read.made:
            for island in read.senders:
                self._reads_from.setdefault(island, {})[read.number] = None

    def _forget_senders(self, read: VersionRead) -> None:
        if read.made:
            for island in read.senders:
                reads = self._reads_from[island]
                del reads[read.number]
                if not reads:
                    del self._reads_from[island]

    # ---- events

    def read(self, session: Session, message: m.ReadVersion) -> None:
        """Make arrays from those of a version. If that is not possible, the arrays are errors."""
        try:
            version, targets = self._checked(session, message)
        except StatusError as error:
            session.note_error(error.status)
            for handle in message.results:
                if handle not in session.directory.entries:
                    session.directory.add(handle, Entry((), 0, BufferState.FAILED, error.status))
            return
        number = self._next
        self._next += 1
        part = message.first, len(targets), session.tenant.name, number  # nothing but this read transfers it
        if not message.is_original:
            part = self._shared_part(version, part)
        places = session.devices.locations
        islands = {frozenset([places[device].island for device in each.sharding.devices]) for each in targets}
        dependency = self._deferred_results.add(session, message.results, targets, "subscribe")
        read = self._reads[number] = VersionRead(
            number,
            session.number,
            message.reader,
            version,
            part,
            targets,
            message.results,
            dependency,
            tuple(sorted(frozenset().union(*islands))),
            tuple(sorted(next(iter(islands)))) if len(islands) == 1 else (),
        )
        self._reads_of.setdefault(session.number, {})[number] = None
        session.reading += 1
        trees = self._trees.setdefault(version.key, {})
        tree = trees.get(part)
        if tree is None:
            tree = trees[part] = TransferTree(_patience(version, part))
        originals = self._originals(read) if tree.waiting else ()
        tree.add(self._outbox.seconds, number, session.number, frozenset(read.near), originals)
        self._note_due(version.key, part, tree, session)

    def _shared_part(self, version: Version, own: Part) -> Part:
        """Return the part that the tenant's reads of these arrays have in common, or `own` if there are too many."""
        first, count, tenant, _ = own
        part = first, count, tenant, 0
        if first % m.MAX_READ == 0 and count == min(m.MAX_READ, len(version.arrays) - first):
            return part
        others = self._others.setdefault((version.key, tenant), {})
        if part not in others and len(others) >= MAX_OTHER_PARTS:
            return own
        others[part] = None
        return part

    def _checked(self, session: Session, message: m.ReadVersion) -> tuple[Version, tuple[ArraySpec, ...]]:
        """Return the version and the types of the arrays. Raise StatusError if these cannot be read."""
        if session.reading >= MAX_READS:
            text = f"{MAX_READS} reads of published arrays by session {session.number} have not ended"
            raise StatusError(Code.RESOURCE_EXHAUSTED, text)
        owner, version = self._names.readers.get(message.reader, (-1, None))
        stop = message.first + len(message.targets)
        if version is not None and owner == session.number:
            if version.error is not None:
                raise version.error.exception()
            arrays = version.arrays[message.first : stop]
            if len(arrays) != len(message.targets):
                raise invalid(f"{version.title} has {counted(len(version.arrays), 'array')}, not {stop}")
            pairs = zip(arrays, message.targets, strict=True)
            targets = tuple([type_of_result(session, array, target) for array, target in pairs])
            if self._names.ask_to_read(session.number, message.reader) is version:
                return version, targets
        raise not_found(
            f"reader {message.reader} of published arrays does not exist in this session, or was closed "
            f"{GUEST_SECONDS:.0f} s after another tenant had replaced its version"
        )

    def are_waiting(self, key: VersionKey) -> bool:
        """Return whether reads of the version wait for a source."""
        return any(tree.waiting for tree in self._trees.get(key, {}).values())

    def proceed(self) -> None:
        """Complete reads whose launches have ended, and launch others that have a source. Sessions take turns.

        Also forget some of what closed sessions have left.
        """
        for _ in range(min(len(self.leaving), _MAX_FORGOTTEN)):
            self._forget_one(self.leaving.popleft())
        left = _MAX_ARRAYS
        while left > 0 and (self.ends.waiting or self.starts.waiting):
            session = self.ends.next()
            if session is not None:
                left -= self._launch_ended(*self.ends.take(session))
            session = self.starts.next()
            if session is not None:
                left -= self._start_one(session, *self.starts.take(session))

    def tick(self, now: float) -> None:
        """Find trees whose transfers stall, and let further reads of them start."""
        for place in list(islice(self._blocked, MAX_EXAMINED)):
            del self._blocked[place]
            tree = self._trees[place[0]][place[1]]
            if not tree.waiting:
                continue
            if tree.running and not tree.is_late(now):
                self._blocked[place] = None
                continue
            tree.stall(now)
            self._start_later(*place)

    def island_failed(self, island: int) -> None:
        """Note the reads that have lost their source. Follows the failure of their launches, which end later."""
        for number in self._reads_from.get(island, ()):
            self._reads[number].is_interrupted = True

    def session_closed(self, session: Session) -> None:
        """Forget the reads of the session, and its copies, in steps. Its arrays are gone.

        Until then, the copies feed nobody and the reads do not start. A read that follows one of them waits for a few
        flushes longer.
        """
        self.programs.pop(session.number, None)
        self.leaving.extend(self._copies_of.pop(session.number, ()))
        self.leaving.extend(self._reads_of.pop(session.number, ()))

    def _forget_one(self, number: int) -> None:
        """Forget a read or a copy of a closed session, unless it was forgotten with its tree."""
        copy, read = self._received.get(number), self._reads.get(number)
        if copy is not None:
            self._tree_of(copy).drop(number)
            self._drop_copy(number)
        if read is not None:
            self._deferred_results.forget(read.dependency)
            self._tree_of(read).forget(self._outbox.seconds, number)
            self._end(read)

    def version_over(self, key: VersionKey) -> None:
        """Handle that the arrays of a version were freed. Reads that wait end, unless copies of readers feed them."""
        for part, tree in list(self._trees.get(key, {}).items()):
            if tree.is_idle:
                self._forget(key, part)
            else:
                self._start_later(key, part)

    def restored(self, version: Version) -> None:
        """Handle that the arrays of a version are on devices again, or could not be restored."""
        for part in self._trees.get(version.key, {}):
            self._start_later(version.key, part)

    def tenant_removed(self, tenant: str) -> None:
        """Handle that all versions of a tenant were freed."""
        for key in [each for each in self._trees if each[0] == tenant]:
            self.version_over(key)

    # ---- starting

    def _tree_of(self, read: VersionRead) -> TransferTree:
        return self._trees[read.version.key][read.part]

    def _originals(self, read: VersionRead) -> list[Islands]:
        """Return the islands of the copies in the vault; none if the version was lost or freed, or is in files only."""
        version = read.version
        is_there = version.error is None and version.is_on_devices and self._names.find(version.key) is version
        return self._vaults.originals(version, read.positions) if is_there else []

    def _start_later(self, key: VersionKey, part: Part) -> None:
        """Try later to start a read of a tree, in the turn of the session of the first one.

        Once the reads of closed sessions that precede it are forgotten, this is called again.
        """
        tree = self._trees[key][part]
        sessions = [self._open.get(tree.sessions[read]) for read in tree.heads()]
        session = next((each for each in sessions if each is not None), None)
        if session is not None:
            self._note_due(key, part, tree, session)

    def _note_due(self, key: VersionKey, part: Part, tree: TransferTree, session: Session) -> None:
        if session.number not in tree.due:
            tree.due.add(session.number)
            self.starts.add(session.number, session.tenant.name, (key, part))

    def _start_one(self, session: int, key: VersionKey, part: Part) -> int:
        """Launch a read of a tree that waits, if it has a source. Return the cost, in arrays."""
        tree, cost = self._trees.get(key, {}).get(part), 1
        if tree is None:
            return cost
        tree.due.discard(session)
        for number in tree.heads():
            read = self._reads[number]
            if read.session not in self._open:
                continue
            originals, near = self._originals(read), frozenset(read.near)
            while (source := tree.choose(near, originals)) is not None:
                cost += max(_MIN_ARRAYS, len(read.results))
                found = self._source(read, source)
                if found is not None:
                    self._launch(self._open[read.session], read, found, tree, source)
                    self._start_later(key, part)
                    return cost
                tree.drop(source)
                self._drop_copy(source)
                if cost >= _MAX_ARRAYS:
                    self._start_later(key, part)
                    return cost
            cost += _MIN_ARRAYS
            if not tree.running and not originals:
                self._await_restoration(self._open[read.session], tree, read)
        if tree.waiting:
            self._blocked[key, part] = None
        return cost

    def _await_restoration(self, session: Session, tree: TransferTree, read: VersionRead) -> None:
        """Have a version restored that is in files only, or fail a read that gets no source."""
        version, files, now = read.version, read.version.files, self._outbox.seconds
        if files is None or not self._names.may_be_restored(version):
            status = self._loss(read)
        elif files.state is FileState.STORED and files.problem and now - tree.changed > MAX_WAIT_SECONDS:
            status = Status(Code.UNAVAILABLE, f"{version.title} is in files, and {files.restoring_text()}")
        else:
            if files.state is FileState.STORED:  # the reader may be closed, so nothing else asks for it
                self._restore(version)
            return
        tree.forget(tree.changed, read.number)  # the time stays, so that others of the tree do not wait as long again
        self._fail(session, read, status)

    def _loss(self, read: VersionRead) -> Status:
        version = read.version
        failure = None if version.files is None else version.files.failure
        return version.error or failure or Status(Code.NOT_FOUND, f"{version.title} was freed while it was read")

    def _source(self, read: VersionRead, number: int) -> _Source | None:
        """Return the arrays of a source, or None if its session does not have all of them any more."""
        if number < 0:
            vault = self._vaults.of(read.version)
            arrays = self._vaults.copies_of(read.version, read.positions, -1 - number, frozenset(read.near))
            return _Source(vault, arrays, vault.devices.locations)
        copy = self._received[number]
        owner = self._open.get(copy.session)
        if owner is None:
            return None
        found: list[tuple[int, ArraySpec]] = []
        places: dict[int, DeviceLocation] = {}
        for handle in copy.results:
            entry = owner.directory.entries.get(handle)
            # The session may have released the array, and given its handle to another one.
            if entry is None or entry.dependency is not copy.dependency or not _is_usable(entry):
                return None
            spec, numbers = spec_of(entry), []
            for device in spec.sharding.devices:
                location = owner.devices.locations[device]
                if location.island not in copy.islands or self._is_reserved(read, location):
                    return None
                places[self._vaults.number_of(location)] = location
                numbers.append(self._vaults.number_of(location))
            found.append((handle, replace(spec, sharding=replace(spec.sharding, devices=tuple(numbers)))))
        return _Source(owner, found, places)

    def _is_reserved(self, read: VersionRead, location: DeviceLocation) -> bool:
        """Return whether a copy there feeds no others: in another session's slice, or on an island being drained."""
        return location.island in self._copies.leaving or bool(self._open[read.session].devices.closed(location))

    def _launch(self, session: Session, read: VersionRead, source: _Source, tree: TransferTree, number: int) -> None:
        senders = {source.places[device].island for _, spec in source.arrays for device in spec.sharding.devices}
        tree.start(self._outbox.seconds, read.number, number, is_near=senders.issubset(read.near))
        try:
            kept = self.programs.setdefault(session.number, [])
            sources = tuple([spec for _, spec in source.arrays])
            program = find_program(kept, self._internal, session, sources, source.places, read.targets)
        except StatusError as error:
            self._note_end_of(read, error.status)
            return
        read.senders, read.is_interrupted = tuple(sorted(senders)), False
        if not read.attempts:
            self.begun.append(read.reader)
        read.attempts += 1
        lent = self._vaults.lend(session, source.owner, source.arrays, read.version)
        read.made = tuple([self._vaults.new_shared_handle() for _ in read.results])
        self._note_senders(read)
        self._internal.take_credit(session)
        launch = m.Launch(program, lent, read.made, ())
        self._launcher.launch(session, launch, partial(self._note_end, read.number))
        entry = session.directory.entries[read.made[0]]
        if entry.spec is None:  # it was not launched
            self._note_end_of(read, entry.error)
        self._buffers.release(session, lent, delete=False)

    # ---- ends

    def _note_end(self, number: int, launch: Launch) -> None:
        read = self._reads.get(number)
        if read is not None and read.session in self._open:
            self._note_end_of(read, launch.error)

    def _note_end_of(self, read: VersionRead, error: Status | None) -> None:
        self.ends.add(read.session, read.part[2], (read.number, error))

    def _launch_ended(self, number: int, error: Status | None) -> int:
        """Complete a read, let it wait for another source, or fail it. Return the cost, in arrays."""
        read = self._reads.get(number)
        session = None if read is None else self._open.get(read.session)
        if read is None or session is None:  # it has ended
            return 1
        tree, now = self._tree_of(read), self._outbox.seconds
        self._forget_senders(read)
        made, read.made = read.made, ()
        entries = session.directory.entries
        error = error or next((entries[each].error for each in made if entries[each].error is not None), None)
        if error is None:
            self._deferred_results.complete(session, read.results, made, read.dependency)
            self._received[number] = read
            self._copies_of.setdefault(read.session, {})[number] = None
            read.targets = ()
            self._count(read, tree)
            dropped = tree.complete(now, number, frozenset(read.islands))
            if dropped is not None:
                self._drop_copy(dropped)
            self._end_of(session, read)
        else:
            self._buffers.release(session, made, delete=False)
            if self._may_retry(read, error):
                tree.wait_again(now, number)
                self._start_later(read.version.key, read.part)
            else:
                tree.forget(now, number)
                self._fail(session, read, error)
        return max(_MIN_ARRAYS, len(read.results))

    def _count(self, read: VersionRead, tree: TransferTree) -> None:
        """Count the bytes that a read has received from other islands."""
        if read.number in tree.beside:
            return
        version, positions = read.version, read.positions
        nbytes = sum(each.nbytes for each in version.arrays[positions.start : positions.stop])
        if tree.running[read.number] < 0:
            version.sent += nbytes
        else:
            version.passed_on += nbytes

    def _may_retry(self, read: VersionRead, error: Status) -> bool:
        """Return whether another source may succeed: the islands of the reader work, and the source has failed."""
        if read.attempts >= _MAX_ATTEMPTS:
            return False
        islands = self._resources.islands
        is_ready = all(islands[each].state in WORKING for each in read.islands)
        return is_ready and (read.is_interrupted or error.details.kind is Kind.LINK)

    def _fail(self, session: Session, read: VersionRead, status: Status) -> None:
        self._deferred_results.fail(session, read.results, read.dependency, status)
        self._end_of(session, read)

    def _end_of(self, session: Session, read: VersionRead) -> None:
        """Forget a read of an open session that has ended."""
        own = self._reads_of[read.session]
        del own[read.number]
        if not own:
            del self._reads_of[read.session]
        session.reading -= 1
        self._end(read)

    def _end(self, read: VersionRead) -> None:
        """Forget a read that has ended. Others of its tree may start."""
        del self._reads[read.number]
        self._forget_senders(read)
        if not read.attempts:
            self.begun.append(read.reader)
        self._start_later(read.version.key, read.part)
        is_over = read.part[3] or self._names.find(read.version.key) is not read.version
        if is_over and self._tree_of(read).is_idle:
            self._forget(read.version.key, read.part)

    def _drop_copy(self, number: int) -> None:
        """Forget a copy that is not a source any more."""
        read = self._received.pop(number)
        own = self._copies_of.get(read.session)
        if own is None:  # its session was closed
            return
        del own[number]
        if not own:
            del self._copies_of[read.session]

    def _forget(self, key: VersionKey, part: Part) -> None:
        """Forget a tree, and the copies that are sources in it."""
        trees = self._trees[key]
        for copy in trees.pop(part).copies:
            self._drop_copy(copy)
        self._blocked.pop((key, part), None)
        others = self._others.get((key, part[2]), {})
        if others.pop(part, 0) is None and not others:
            del self._others[key, part[2]]
        if not trees:
            del self._trees[key]

    # ---- reports

    @property
    def is_idle(self) -> bool:
        """Return whether no read has not ended, and no copy is a source."""
        queues = self.starts.waiting, self.ends.waiting, self.begun, self.leaving
        return not (self._reads or self._received or self._trees or self._others or any(queues))

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. For tests, since it looks at everything."""
        trees = [tree for parts in self._trees.values() for tree in parts.values()]
        waiting = {read for tree in trees for read in tree.waiting}
        for tree in trees:
            lines = tree.interrupted, tree.line, *tree.others.values(), *tree.near.values()
            assert sorted(read for line in lines for read in line) == sorted(tree.waiting)
            assert tree.waiting.keys() | tree.running.keys() == tree.sessions.keys()
            assert tree.reads_of == Counter(tree.sessions.values())
            assert tree.beside <= tree.running.keys()
            assert tree.rounds <= MAX_ROUNDS, f"{tree.rounds} rounds"
            assert tree.extra <= 1 << MAX_ROUNDS, f"{tree.extra} reads may start"
        places = [(key, part) for key, parts in self._trees.items() for part in parts]
        assert self._blocked.keys() <= set(places)
        others = {(key, part) for (key, _), parts in self._others.items() for part in parts}
        assert others <= set(places)
        left = set(self.leaving)
        stuck = [(key, part) for key, part in places if self._trees[key][part].waiting]
        for key, part in stuck:
            tree = self._trees[key][part]
            assert (key, part) in self._blocked or tree.due or left.issuperset(tree.heads())
        for found, by_session in ((self._reads, self._reads_of), (self._received, self._copies_of)):
            numbers = {(read.session, read.number) for read in found.values() if read.number not in left}
            assert numbers == {(session, read) for session, own in by_session.items() for read in own}
            assert all(session in self._open for session in by_session)
            assert not any(read.session in self._open for read in found.values() if read.number in left)
        sending = {(island, number) for number, read in self._reads.items() if read.made for island in read.senders}
        assert sending == {(island, read) for island, reads in self._reads_from.items() for read in reads}
        running = {read for tree in trees for read in tree.running}
        assert waiting.isdisjoint(running)
        assert waiting | running == self._reads.keys()
        assert {copy for tree in trees for copy in tree.copies} == self._received.keys()
        assert all(self._tree_of(read).running.keys() >= {read.number} for read in self._reads.values() if read.made)
        reading = Counter(read.session for read in self._reads.values() if read.number not in left)
        assert reading == {each.number: each.reading for each in self._open.values() if each.reading}


def _patience(version: Version, part: Part) -> float:
    """Return the seconds after which transfers of a part stall if none begins or ends, while all parts are read."""
    nbytes = sum(each.nbytes for each in version.arrays[part[0] : part[0] + part[1]])
    return _PATIENCE_SECONDS + nbytes * len(version.arrays) / part[1] / _SLOWEST


def _is_usable(entry: Entry) -> bool:
    """Return whether another session may read the array now."""
    return entry.state is BufferState.READY and not entry.released and not entry.consumed
