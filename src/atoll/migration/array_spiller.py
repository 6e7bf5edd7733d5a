"""Spill arrays and restore them: one mechanism for suspended sessions and for idle arrays.

To spill an array, the hosts that have it copy the contents of its shards to their memory or to files
(`worker.spill_store`). Its device memory is freed only after all of them have done so, so a failure leaves the array as
it was. To restore it, the controller launches an ordinary program that makes an array from host buffers, whose feeds
are the spilled pieces. The launch therefore takes memory in the islands' order and waits for it like any other,
launches that need the array queue behind it in its session, and the array may return to other devices.

An array that shares all of its memory with other arrays is a view of them. Its contents are spilled only once.

Pure. Invariant: a logical buffer is on devices, spilled, or being restored, and its directory entry stays the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import msgspec

from atoll.cluster.lifecycle import IslandReady, IslandRestarted
from atoll.cluster.locations import Placement
from atoll.errors import OK, Code, Details, Kind, Status, failure, unimplemented
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec, Opaque, Replicated, Tiled, shard_boxes, shard_shape
from atoll.launch.launches import Launches
from atoll.launch.shared_state import SharedState
from atoll.migration.array_views import Shard, spec_of, view_program, views_of
from atoll.migration.internal_programs import InternalPrograms
from atoll.migration.manifest import manifest_of
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import SPILL_FEEDS
from atoll.state.buffer_directory import Entry, SpilledArray, SpilledPart
from atoll.state.session import Launch, Session
from atoll.state.stepped_work import taken

_MAX_DROPPED = 1024  # pieces of a message
# Arrays that are spilled together and that are handled in one flush.
_MAX_AT_ONCE = 512
# Files that a host will remove when it is there. The oldest ones are forgotten, and stay on its disk.
MAX_LEFT = 16_384
# Arrays, and their bytes, that one launch restores if a failure of one is a failure of all. Larger ones have their own.
MAX_TOGETHER = 64
_MAX_TOGETHER_BYTES = 4 << 20

# By host: the number of a piece, a handle, and the number of its shard on the host, as in `SpillRequest`.
_ShardsByHost = dict[int, list[tuple[int, int, int]]]

# Called when hosts have saved arrays, with their contents by handle, or with an error and nothing.
Saved = Callable[[Status, dict[int, SpilledArray]], None]


@dataclass(eq=False, kw_only=True)
class _Request:
    """Arrays whose contents hosts have been asked to keep."""

    left: set[int]  # hosts that have not replied
    pieces: dict[int, m.SpilledPiece] = field(default_factory=dict)  # by number
    failure: Status | None = None

    def kept(self, parts: tuple[SpilledPart, ...]) -> SpilledArray:
        """Return an array with those of its parts that hosts keep."""
        pieces = self.pieces
        return SpilledArray(
            tuple(
                SpilledPart(pieces[part.piece.number], part.host, part.positions)
                for part in parts
                if part.piece.number in pieces
            )
        )


@dataclass(eq=False, kw_only=True)
class _Spill(_Request):
    """Arrays that are being spilled. `then(status)` is called after all hosts have replied."""

    session: Session
    arrays: dict[int, tuple[Entry, tuple[SpilledPart, ...]]]  # by handle
    views: dict[int, tuple[Shard, ...]]  # of these
    then: Callable[[Status], None]
    directory: str = ""
    undivided: list[int] = field(default_factory=list)  # arrays whose parts are not known yet, the next one last
    shards: _ShardsByHost = field(default_factory=dict)  # that hosts will be asked to keep
    copied: list[int] = field(default_factory=list)  # arrays to be freed on devices, the next one last


@dataclass(eq=False, kw_only=True)
class _Save(_Request):
    """Arrays that are being written to files, and stay on devices."""

    parts: dict[int, tuple[SpilledPart, ...]]  # by handle
    then: Saved


class _Restore(msgspec.Struct, eq=False):
    """An array that is being restored. With `keeps`, its spilled pieces stay until they are dropped."""

    session: Session
    handle: int
    entry: Entry
    spilled: SpilledArray
    then: Callable[[int, Status], None] | None
    keeps: bool
    launch: Launch | None = None


class ArraySpiller:
    """Spills and restores arrays of sessions.

    A session may have 65,536 arrays. If many are spilled together, each flush handles some of them.
    """

    def __init__(self, shared: SharedState, launches: Launches, internal: InternalPrograms) -> None:
        self._sessions = shared.sessions
        self._resources = shared.resources
        self._launcher, self._failing = launches.launcher, launches.failing
        self._reservations = launches.reservations
        self._internal = internal
        self._outbox = shared.outbox
        self._spills: dict[int, _Spill] = {}  # by request
        self.working: dict[int, None] = {}  # those of these requests that continue in the next flush
        self._saves: dict[int, _Save] = {}  # by request
        self._restores: dict[tuple[int, int], _Restore] = {}  # by session and handle
        self.losses: Counter[int] = Counter()  # by host: how often its memory was lost
        self._by_feed: dict[tuple[int, int], _Restore] = {}  # by session and feed
        # The number of pieces in each file of a session, by session, and by host and path.
        self._files: dict[int, dict[tuple[int, str], int]] = {}
        self._left: dict[int, dict[str, None]] = {}  # files to remove, by host that is not there
        self._next_request = 1
        self.next_piece = 1
        self._next_feed = SPILL_FEEDS.start

    # ---- spilling

    def spill(
        self, session: Session, handles: Iterable[int], then: Callable[[Status], None], directory: str = ""
    ) -> None:
        """Spill all of these arrays or none, to files if there is a `directory`. Arrays used meanwhile stay.

        Raises UNIMPLEMENTED for an array that has no known shards.
        """
        entries = _entries_of_known_kind(session, handles)
        views = views_of(entries, session.devices.locations)
        number = self._new_request()
        arrays: dict[int, tuple[Entry, tuple[SpilledPart, ...]]] = {
            handle: (entry, ()) for handle, entry in entries.items() if handle not in views
        }
        undivided = list(reversed(arrays))
        arrays.update((handle, (entries[handle], ())) for handle in views)
        spill = self._spills[number] = _Spill(
            session=session,
            arrays=arrays,
            views=views,
            left=set(),
            then=then,
            directory=directory,
            undivided=undivided,
        )
        self._continue(number, spill)

    def proceed(self) -> None:
        """Continue to spill some arrays. Requests take turns."""
        for number in list(self.working)[:1]:
            del self.working[number]
            self._continue(number, self._spills[number])

    def _continue(self, number: int, spill: _Spill) -> None:
        """Handle some arrays of a request, and call `then` after the last one."""
        if spill.copied:
            self._free_copied(spill)
            if not spill.copied:
                del self._spills[number]
                spill.then(spill.failure or OK)
                return
        elif spill.failure is not None:
            self._done(number, spill)
            return
        else:
            for handle in taken(spill.undivided, _MAX_AT_ONCE):
                entry, _ = spill.arrays[handle]
                if entry.is_idle:
                    spill.arrays[handle] = entry, self._divided(spill.session, handle, entry, True, spill.shards)
            if not spill.undivided:
                self._send(number, spill)
                return
        self.working[number] = None

    def _send(self, number: int, spill: _Spill) -> None:
        text = b""
        if spill.directory:
            arrays = {
                handle: SpilledArray(some, spill.views.get(handle, ())) for handle, (_, some) in spill.arrays.items()
            }
            text = manifest_of(spill.session, arrays)
        shards, spill.shards = spill.shards, {}
        self._begin(spill.session, number, spill, shards, spill.directory, text)

    def save(self, session: Session, handles: Iterable[int], directory: str, then: Saved) -> None:
        """Write these arrays to files in a `directory`, all or none. They also stay on devices.

        Raises UNIMPLEMENTED for an array that has no known shards.
        """
        shards: _ShardsByHost = {}
        entries = _entries_of_known_kind(session, handles)
        parts = {handle: self._divided(session, handle, entry, False, shards) for handle, entry in entries.items()}
        number = self._new_request()
        save = self._saves[number] = _Save(parts=parts, left=set(), then=then)
        self._begin(session, number, save, shards, directory)

    def _new_request(self) -> int:
        self._next_request += 1
        return self._next_request - 1

    def _begin(
        self,
        session: Session,
        number: int,
        request: _Spill | _Save,
        shards: _ShardsByHost,
        directory: str,
        text: bytes = b"",
    ) -> None:
        """Have hosts copy these shards to their memory, or to files if there is a `directory`."""
        request.left = set(shards)
        to_files = bool(directory)
        for host, some in sorted(shards.items()):
            self._outbox.to_host(
                host, m.SpillRequest(session.number, number, tuple(some), to_files, directory, text, to_files)
            )
        if not shards:
            self._done(number, request)

    def _divided(
        self, session: Session, handle: int, entry: Entry, per_host: bool, shards: _ShardsByHost
    ) -> tuple[SpilledPart, ...]:
        """Return the `_parts` of an array, and add the shards that hold them to `shards`."""
        parts = self._parts(session, handle, entry, per_host)
        for part, shard in parts:
            shards.setdefault(part.host, []).append((part.piece.number, handle, shard))
        return tuple([part for part, _ in parts])

    def _parts(self, session: Session, handle: int, entry: Entry, per_host: bool) -> list[tuple[SpilledPart, int]]:
        """Return the parts of an array to keep, each with the number of a shard on its host that holds the contents.

        With `per_host`, each host keeps what it has. Otherwise each part is kept once, and arrays with different
        handles are kept on different hosts.
        """
        spec = entry.spec
        assert spec is not None
        same: dict[object, list[int]] = {}
        holders: dict[object, list[tuple[int, int]]] = {}  # a host, and the number of the shard there
        counts: dict[int, int] = {}
        for position, device in enumerate(spec.sharding.devices):
            host = session.devices.locations[device].host
            key: object = (host if per_host else -1, _contents_key(spec, position))
            holders.setdefault(key, []).append((host, counts.get(host, 0)))
            counts[host] = counts.get(host, 0) + 1
            same.setdefault(key, []).append(position)
        parts = []
        for contents, positions in same.items():
            host, shard = holders[contents][0 if per_host else handle % len(positions)]
            parts.append((SpilledPart(m.SpilledPiece(self.next_piece), host, tuple(positions)), shard))
            self.next_piece += 1
        return parts

    # ---- replies

    def spill_replied(self, host: int, message: m.SpillReply) -> None:
        """Handle that a host has copied its part, or failed to."""
        request = self._saves.get(message.request) or self._spills.get(message.request)
        if request is None or host not in request.left:
            self._drop(message.session, host, message.pieces)
            return
        request.pieces.update((piece.number, piece) for piece in message.pieces)
        self._replied(message.request, request, {host}, message.status)

    def _replied(self, number: int, request: _Spill | _Save, hosts: set[int], status: Status) -> None:
        """Note that hosts have kept their parts or, if the status is an error, that they have not."""
        request.left -= hosts
        if not status.ok:
            request.failure = request.failure or status
        if not request.left:
            self._done(number, request)

    def _done(self, number: int, request: _Spill | _Save) -> None:
        if isinstance(request, _Spill):
            request.undivided.clear()
            request.copied = list(reversed(request.arrays))
            if request.copied:
                self._continue(number, request)
            else:
                del self._spills[number]
                request.then(request.failure or OK)
        else:
            del self._saves[number]
            self._save_done(request)

    def _save_done(self, save: _Save) -> None:
        found = {handle: save.kept(parts) for handle, parts in save.parts.items()}
        count = sum(map(len, save.parts.values()))
        if save.failure is None and sum(len(each.parts) for each in found.values()) < count:
            save.failure = Status(Code.INTERNAL, "a host has not written all of its pieces")
        if save.failure is None:
            save.then(OK, found)
            return
        self.drop_files(found.values())
        save.then(save.failure, {})

    def _free_copied(self, spill: _Spill) -> None:
        """Free the device memory of some copied arrays, or drop the copies of arrays that stay."""
        session = spill.session
        for handle in taken(spill.copied, _MAX_AT_ONCE):
            entry, parts = spill.arrays[handle]
            there = (
                (part.host, spill.pieces[part.piece.number]) for part in parts if part.piece.number in spill.pieces
            )
            self._count_files(session, there)
            spilled = self._spilled(spill, handle, parts)
            is_there = session.directory.entries.get(handle) is entry and entry.is_idle
            is_whole = spilled is not None and (bool(parts) or handle in spill.views)
            if spill.failure is None and spilled is not None and is_whole and is_there:
                self._outbox.free(entry.hosts, session.number, (handle,))
                self._reservations.release(entry)
                entry.spill(spilled)
                session.has_spilled = True
            elif spilled is not None:
                self.drop(session, spilled)
        self._outbox.flush_frees()  # frees the memory before anything is restored under the same handle

    def _spilled(self, spill: _Spill, handle: int, parts: tuple[SpilledPart, ...]) -> SpilledArray | None:
        """Return the spilled array; None for a view of arrays that are not spilled."""
        if handle not in spill.views:
            return spill.kept(parts)
        sources = {source for source, _ in spill.views[handle]}
        spilled_arrays = [spill.arrays[source][0].spilled for source in sources]
        if any(each is None for each in spilled_arrays):
            return None
        hosts = {host for each in spilled_arrays if each is not None for host in each.memory_hosts}
        return SpilledArray((), spill.views[handle], tuple(sorted(hosts)))

    def cancel(self, session: Session, status: Status) -> None:
        """Cancel the spilling of the session's arrays, which stay on its devices."""
        for spill in self._spills.values():
            if spill.session is session:
                spill.failure = spill.failure or status

    # ---- restoring

    def restore(
        self,
        session: Session,
        handles: Iterable[int],
        then: Callable[[int, Status], None] | None = None,
        places: Placement | None = None,
        keeps: bool = False,
    ) -> None:
        """Launch programs that make these arrays again, at the session's places or at others.

        `then(handle, status)` is called for each array after its launch has ended. Small arrays share a launch if they
        keep their pieces, because the caller then needs all arrays. Raises StatusError if an array cannot be there.
        """
        places = session.devices.locations if places is None else places
        entries = session.directory.entries
        programs: dict[ir.Program, int] = {}

        def launch(arrays: Sequence[_Restore], definition: ir.Program, sources: tuple[int, ...] = ()) -> None:
            if definition not in programs:
                programs[definition] = self._internal.make(session, definition, places)
            self._launch(session, arrays, programs[definition], sources, places)

        whole = [handle for handle in handles if not _spilled_array(entries[handle]).views]
        views = [handle for handle in handles if _spilled_array(entries[handle]).views]
        try:
            restores = [
                _Restore(session, each, entries[each], _spilled_array(entries[each]), then, keeps) for each in whole
            ]
            for arrays in _groups_to_restore(restores, places) if keeps else [[each] for each in restores]:
                launch(arrays, _definition(arrays))
            for handle in views:
                entry = entries[handle]
                spilled = _spilled_array(entry)
                sources = {source: entries[source].spec for source, _ in spilled.views if source in entries}
                specs = {source: each for source, each in sources.items() if each is not None}
                if len(specs) < len({source for source, _ in spilled.views}):  # a faulty proxy released a source
                    message = "the array that contained it was released"
                    status = failure(Code.DATA_LOSS, message, Details(Kind.CONTENTS))
                    session.directory.lose(entry, status)
                    if then is not None:
                        then(handle, status)
                    continue
                restore = _Restore(session, handle, entry, spilled, then, keeps)
                launch([restore], view_program(spec_of(entry), spilled.views, specs), tuple(specs))
        finally:
            for number in programs.values():
                self._internal.drop(session, number)

    def _launch(
        self,
        session: Session,
        arrays: Sequence[_Restore],
        program: int,
        sources: tuple[int, ...],
        places: Placement,
    ) -> None:
        first = self._next_feed
        by_host: dict[int, list[tuple[m.SpilledPiece, int, tuple[int, ...]]]] = {}
        for restore in arrays:
            devices = spec_of(restore.entry).sharding.devices
            self._restores[session.number, restore.handle] = restore
            for part in restore.spilled.parts:
                feed = self._next_feed
                self._next_feed += 1
                self._by_feed[session.number, feed] = restore
                hosts = tuple(sorted({places[devices[position]].host for position in part.positions}))
                # If the host is not there, others on its machine can read the files.
                keeper = part.host if self._is_there(part.host) else hosts[0]
                by_host.setdefault(keeper, []).append((part.piece, feed, hosts))
            restore.entry.restore()
        feeds = tuple(range(first, self._next_feed))
        for host, pieces in sorted(by_host.items()):
            self._outbox.to_host(host, m.SendSpilled(session.number, first, tuple(pieces)))
        self._internal.take_credit(session)
        message = m.Launch(program, sources, tuple(each.handle for each in arrays), feeds)
        then = partial(self._restored, tuple(arrays), feeds)
        launch = self._launcher.launch_to_restore(session, message, then)
        for restore in arrays:
            restore.launch = launch

    def _is_there(self, host: int) -> bool:
        record = self._resources.hosts.get(host)
        return record is not None and self._resources.islands[record.island].works

    def _restored(self, arrays: Sequence[_Restore], feeds: tuple[int, ...], launch: Launch) -> None:
        number = arrays[0].session.number
        for feed in feeds:
            self._by_feed.pop((number, feed), None)
        for restore in arrays:
            if self._restores.get((number, restore.handle)) is restore:
                del self._restores[number, restore.handle]
        for restore in arrays:
            if not restore.keeps:
                self.drop(restore.session, restore.spilled)
            if restore.then is not None:
                restore.then(restore.handle, launch.error or OK)

    def failed(self, host: int, message: m.SendSpilledFailed) -> None:
        """Fail the array whose piece cannot be delivered."""
        restore = self._by_feed.get((message.session, message.feed))
        if restore is not None and restore.launch is not None:
            self._failing.fail(restore.launch, message.status)

    def fail_restores(self, session: Session, handles: Iterable[int], status: Status) -> None:
        """Fail the launches that restore these arrays."""
        for handle in handles:
            restore = self._restores.get((session.number, handle))
            if restore is not None and restore.launch is not None:
                self._failing.fail(restore.launch, status)

    def restore_failed(
        self, session: Session, kept: Mapping[int, SpilledArray], losses: Mapping[int, int], status: Status
    ) -> None:
        """Mark arrays of a failed restoration as spilled again.

        An array is lost if one of the hosts with its pieces has lost its memory since `losses` was recorded.
        """
        for restore in list(self._restores.values()):
            if restore.session is session and restore.launch is not None:
                self._failing.fail(restore.launch, status)
        for handle, spilled in kept.items():
            entry = session.directory.entries.get(handle)
            if entry is None or entry.spilled is not None:
                continue
            self._outbox.free(entry.hosts, session.number, (handle,))
            self._reservations.release(entry)
            if all(self.losses[host] == losses.get(host, 0) for host in spilled.memory_hosts):
                entry.spill(spilled)
            else:
                session.directory.lose(entry, status)
                self.drop(session, spilled)
        self._outbox.flush_frees()

    # ---- the end

    def drop(self, session: Session, spilled: SpilledArray) -> None:
        """Drop the pieces of a spilled array that is not needed anymore. A file is dropped with its last piece."""
        files = self._files.get(session.number, {})
        for host, pieces in spilled.by_host():
            dropped = []
            for piece in pieces:
                left = files.pop((host, piece.path), 1) - 1
                if left:
                    files[host, piece.path] = left
                else:
                    dropped.append(piece)
            self._drop(session.number, host, tuple(dropped))
        if not files:
            self._files.pop(session.number, None)

    def drop_files(self, arrays: Iterable[SpilledArray]) -> None:
        """Remove the files of saved arrays, if the hosts that wrote them are there. Pieces in one file are together."""
        by_host: dict[int, dict[str, m.SpilledPiece]] = {}
        for each in arrays:
            for part in each.parts:
                by_host.setdefault(part.host, {})[part.piece.path] = part.piece
        for host, of_files in sorted(by_host.items()):
            pieces = list(of_files.values())
            for first in range(0, len(pieces), _MAX_DROPPED):
                self._drop(0, host, tuple(pieces[first : first + _MAX_DROPPED]))

    def add_persisted(self, session: Session) -> None:
        """Note the files of a session that an earlier cluster suspended on disk."""
        spilled = (entry.spilled for entry in session.directory.entries.values())
        parts = (part for each in spilled if each is not None for part in each.parts)
        self._count_files(session, ((part.host, part.piece) for part in parts))

    def _count_files(self, session: Session, pieces: Iterable[tuple[int, m.SpilledPiece]]) -> None:
        """Count pieces with the hosts that have them in the files of a session."""
        for host, piece in pieces:
            if piece.path:
                files = self._files.setdefault(session.number, {})
                files[host, piece.path] = files.get((host, piece.path), 0) + 1

    def _drop(self, session: int, host: int, pieces: tuple[m.SpilledPiece, ...]) -> None:
        """Drop pieces. If the host is not there, its memory is lost, and it removes the files later."""
        if pieces and self._is_there(host):
            self._outbox.to_host(host, m.DropSpilled(session, pieces))
        else:
            left = self._left.setdefault(host, {})
            left.update((piece.path, None) for piece in pieces if piece.path)
            for path in list(islice(left, max(0, len(left) - MAX_LEFT))):
                del left[path]

    def island_ready(self, ready: IslandReady | IslandRestarted) -> None:
        """Remove the files that were dropped while their hosts were not there."""
        for host in self._resources.hosts_of(ready.island) if self._left else ():
            paths = iter(self._left.pop(host, {}))
            while some := tuple(m.SpilledPiece(0, path=path) for path in islice(paths, _MAX_DROPPED)):
                self._outbox.to_host(host, m.DropSpilled(0, some))

    def session_closed(self, session: Session) -> None:
        """Drop the session's pieces in files. Pieces in memory are dropped with the session's stores."""
        for entry in session.directory.entries.values() if session.has_spilled else ():
            if entry.spilled is not None and entry.spilled.in_files:
                self.drop(session, entry.spilled)
        for host, path in self._files.pop(session.number, {}):  # of arrays that are being restored
            self._drop(session.number, host, (m.SpilledPiece(0, path=path),))
        for table in (self._restores, self._by_feed):
            for key in [key for key in table if key[0] == session.number]:
                del table[key]
        for request, spill in list(self._spills.items()):
            if spill.session is session:
                del self._spills[request]
                self.working.pop(request, None)

    def hosts_failed(self, hosts: set[int], status: Status) -> None:
        """Fail the pending copies of these hosts, and the arrays whose pieces were in their memory."""
        self.losses.update(hosts)
        for restore in list(self._restores.values()):
            if restore.launch is not None and not hosts.isdisjoint(restore.spilled.memory_hosts):
                self._failing.fail(restore.launch, status.within(restore.entry.producer))
        for session in self._sessions.values():
            for entry in session.directory.entries.values() if session.has_spilled else ():
                if entry.spilled is not None and not hosts.isdisjoint(entry.spilled.memory_hosts):
                    self.drop(session, entry.spilled)
                    session.directory.lose(entry, status.within(entry.producer))
                    session.note_error(status)
        tables: tuple[Mapping[int, _Spill | _Save], ...] = (self._saves, self._spills)
        for table in tables:  # a save that ends may begin a spill
            for number, request in list(table.items()):
                if request.left & hosts:
                    self._replied(number, request, hosts, status)
                elif isinstance(request, _Spill) and not hosts.isdisjoint(request.shards):
                    request.failure = request.failure or status  # before these hosts were asked


def _entries_of_known_kind(session: Session, handles: Iterable[int]) -> dict[int, Entry]:
    """Return the entries of arrays by handle. Raise UNIMPLEMENTED for an array that has no known shards."""
    entries = {handle: session.directory.entries[handle] for handle in handles}
    for handle, entry in entries.items():
        if entry.spec is None or isinstance(entry.spec.sharding.tiling, Opaque):
            raise unimplemented(f"array {handle}, made by {entry.producer!r}, is of a kind that cannot be spilled")
    return entries


def _spilled_array(entry: Entry) -> SpilledArray:
    """Return the contents of an array that is spilled."""
    assert entry.spilled is not None
    return entry.spilled


def _contents_key(spec: ArraySpec, position: int) -> object:
    """Return a value that is equal for shards with the same contents, as far as the sharding determines it."""
    if isinstance(spec.sharding.tiling, Replicated):
        return ()
    return shard_boxes(spec.sharding, spec.shape)[position] if isinstance(spec.sharding.tiling, Tiled) else position


def _groups_to_restore(arrays: Iterable[_Restore], places: Placement) -> Iterator[list[_Restore]]:
    """Yield the arrays that one launch restores: few or small ones on the same islands, or a single one."""
    groups: dict[frozenset[int], tuple[list[_Restore], int]] = {}
    for restore in arrays:
        islands = frozenset([places[device].island for device in spec_of(restore.entry).sharding.devices])
        group, nbytes = groups.get(islands, ([], 0))
        nbytes += restore.spilled.nbytes
        if group and (nbytes > _MAX_TOGETHER_BYTES or len(group) == MAX_TOGETHER):
            yield group
            group, nbytes = [], restore.spilled.nbytes
        group.append(restore)
        groups[islands] = group, nbytes
    for group, _ in groups.values():
        yield group


def _definition(arrays: Sequence[_Restore]) -> ir.Program:
    """Return a program that makes arrays from one host buffer for each of their parts."""
    buffers: list[ir.HostBuffer] = []
    for output, restore in enumerate(arrays):
        spec = spec_of(restore.entry)
        for part in restore.spilled.parts:
            shape = shard_shape(spec.sharding, spec.shape, part.positions[0])
            buffers.append(ir.HostBuffer(len(buffers), shape, None, part.positions, output))
    node = ir.HostToDevice(tuple(buffers), tuple(spec_of(each.entry) for each in arrays))
    return ir.single("bring back", (), node, feeds=len(buffers))
