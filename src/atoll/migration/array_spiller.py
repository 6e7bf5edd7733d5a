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

from atoll.cluster.lifecycle import IslandReady, IslandRestarted
from atoll.cluster.locations import DeviceLocation, Placement
from atoll.cluster.resources import ResourceManager
from atoll.errors import OK, Code, Details, Kind, Status, failure, unimplemented
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec, Opaque, Replicated, Tiled, shard_boxes, shard_shape
from atoll.migration.controller import InternalPrograms, Launches, Out
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import SPILL_FEEDS
from atoll.state.buffer_directory import Entry, SpilledArray, SpilledPart
from atoll.state.decisions import Decisions
from atoll.state.memory_ledger import Block
from atoll.state.session import Launch, Session

_MOST_DROPPED = 1024  # pieces of a message
# Files that a host will remove when it is there. The oldest ones are forgotten, and stay on its disk.
MOST_LEFT = 16_384
# Arrays, and their bytes, that one launch restores if a failure of one is a failure of all. Larger ones have their own.
MOST_TOGETHER = 64
_MOST_TOGETHER_BYTES = 4 << 20

# A handle and the position of one of its shards.
Shard = tuple[int, int]


@dataclass(eq=False)
class _Spill:
    """Arrays that are being spilled. `then(status)` is called after all hosts have replied."""

    session: Session
    arrays: dict[int, tuple[Entry, tuple[SpilledPart, ...]]]  # by handle
    views: dict[int, tuple[Shard, ...]]  # of these
    left: set[int]  # hosts
    then: Callable[[Status], None]
    pieces: dict[int, m.SpilledPiece] = field(default_factory=dict)  # by number
    failure: Status | None = None


# Called when hosts have saved arrays, with their contents by handle, or with an error and nothing.
Saved = Callable[[Status, dict[int, SpilledArray]], None]


@dataclass(eq=False)
class _Save:
    """Arrays that are being written to files, and stay on devices."""

    parts: dict[int, tuple[SpilledPart, ...]]  # by handle
    left: set[int]  # hosts
    then: Saved
    pieces: dict[int, m.SpilledPiece] = field(default_factory=dict)  # by number
    failure: Status | None = None


@dataclass(eq=False)
class _Restore:
    """An array that is being restored. With `keeps`, its spilled pieces stay until they are dropped."""

    session: Session
    handle: int
    entry: Entry
    spilled: SpilledArray
    then: Callable[[int, Status], None] | None
    keeps: bool
    launch: Launch | None = None


def _no_manifest(arrays: Mapping[int, SpilledArray]) -> bytes:
    return b""


class ArraySpiller:
    """Spills and restores arrays of sessions."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        resources: ResourceManager,
        launches: Launches,
        internal: InternalPrograms,
        out: Out,
        decisions: Decisions,
    ) -> None:
        self._decisions = decisions
        self._sessions = sessions
        self._resources = resources
        self._launches = launches
        self._internal = internal
        self._out = out
        self._spills: dict[int, _Spill] = {}  # by request
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
        self,
        session: Session,
        handles: Iterable[int],
        then: Callable[[Status], None],
        directory: str = "",
        manifest: Callable[[Mapping[int, SpilledArray]], bytes] = _no_manifest,
    ) -> None:
        """Spill all of these arrays or none, to files if there is a `directory`. Arrays used meanwhile stay.

        Raises UNIMPLEMENTED for an array that has no known shards.
        """
        entries = {handle: session.directory.entries[handle] for handle in handles}
        for handle, entry in entries.items():
            _check_kind(handle, entry)
        views = _views_of(entries, session.devices.locations)
        arrays: dict[int, tuple[Entry, tuple[SpilledPart, ...]]] = {}
        shards: dict[int, list[tuple[int, int, int]]] = {}  # by host
        for handle, entry in sorted(entries.items(), key=lambda each: each[0] in views):  # views after the others
            parts = self._parts(session, handle, entry, per_host=True) if handle not in views else []
            arrays[handle] = (entry, tuple(part for part, _ in parts))
            for part, shard in parts:
                shards.setdefault(part.host, []).append((part.piece.number, handle, shard))
        request = self._next_request
        self._next_request += 1
        self._spills[request] = spill = _Spill(session, arrays, views, set(shards), then)
        spilled_arrays = {handle: SpilledArray(parts, views.get(handle, ())) for handle, (_, parts) in arrays.items()}
        text = manifest(spilled_arrays) if directory else b""
        for host, some in sorted(shards.items()):
            self._out.to_host(
                host,
                m.SpillRequest(session.number, request, tuple(some), bool(directory), directory, text, bool(directory)),
            )
        if not shards:
            self._spill_done(request, spill)

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
            key: object = (host if per_host else -1, _contents(spec, position))
            holders.setdefault(key, []).append((host, counts.get(host, 0)))
            counts[host] = counts.get(host, 0) + 1
            same.setdefault(key, []).append(position)
        parts = []
        for contents, positions in same.items():
            host, shard = holders[contents][0 if per_host else handle % len(positions)]
            parts.append((SpilledPart(m.SpilledPiece(self.next_piece), host, tuple(positions)), shard))
            self.next_piece += 1
        return parts

    # ---- saving

    def save(self, session: Session, handles: Iterable[int], directory: str, then: Saved) -> None:
        """Write these arrays to files in a `directory`, all or none. They also stay on devices.

        Raises UNIMPLEMENTED for an array that has no known shards.
        """
        entries = {handle: session.directory.entries[handle] for handle in handles}
        for handle, entry in entries.items():
            _check_kind(handle, entry)
        parts: dict[int, tuple[SpilledPart, ...]] = {}
        shards: dict[int, list[tuple[int, int, int]]] = {}  # by host
        for handle, entry in entries.items():
            of_array = self._parts(session, handle, entry, per_host=False)
            parts[handle] = tuple(part for part, _ in of_array)
            for part, shard in of_array:
                shards.setdefault(part.host, []).append((part.piece.number, handle, shard))
        request = self._next_request
        self._next_request += 1
        self._saves[request] = save = _Save(parts, set(shards), then)
        for host, some in sorted(shards.items()):
            put = m.SpillRequest(session.number, request, tuple(some), True, directory, are_dropped_together=True)
            self._out.to_host(host, put)
        if not shards:
            self._save_done(request, save)

    def _save_done(self, request: int, save: _Save) -> None:
        del self._saves[request]
        found = {
            handle: SpilledArray(
                tuple(
                    SpilledPart(save.pieces[part.piece.number], part.host, part.positions)
                    for part in parts
                    if part.piece.number in save.pieces
                )
            )
            for handle, parts in save.parts.items()
        }
        if save.failure is None and sum(len(each.parts) for each in found.values()) < sum(
            map(len, save.parts.values())
        ):
            save.failure = Status(Code.INTERNAL, "a host has not written all of its pieces")
        if save.failure is None:
            save.then(OK, found)
            return
        self.drop_files(found.values())
        save.then(save.failure, {})

    def drop_files(self, arrays: Iterable[SpilledArray]) -> None:
        """Remove the files of saved arrays, if the hosts that wrote them are there. Pieces in one file are together."""
        by_host: dict[int, dict[str, m.SpilledPiece]] = {}
        for each in arrays:
            for part in each.parts:
                by_host.setdefault(part.host, {})[part.piece.path] = part.piece
        for host, of_files in sorted(by_host.items()):
            pieces = list(of_files.values())
            for first in range(0, len(pieces), _MOST_DROPPED):
                self._drop(0, host, tuple(pieces[first : first + _MOST_DROPPED]))

    def spill_replied(self, host: int, message: m.SpillReply) -> None:
        """Handle that a host has copied its part, or failed to."""
        save = self._saves.get(message.request)
        if save is not None and host in save.left:
            save.left.discard(host)
            save.pieces.update((piece.number, piece) for piece in message.pieces)
            if not message.status.ok:
                save.failure = save.failure or message.status
            if not save.left:
                self._save_done(message.request, save)
            return
        spill = self._spills.get(message.request)
        if spill is None or host not in spill.left:
            self._drop(message.session, host, message.pieces)
            return
        spill.left.discard(host)
        spill.pieces.update((piece.number, piece) for piece in message.pieces)
        if not message.status.ok:
            spill.failure = spill.failure or message.status
        if not spill.left:
            self._spill_done(message.request, spill)

    def _spill_done(self, request: int, spill: _Spill) -> None:
        del self._spills[request]
        session = spill.session
        parts_of = (part for _, parts in spill.arrays.values() for part in parts if part.piece.number in spill.pieces)
        self._count_files(session, ((part.host, spill.pieces[part.piece.number]) for part in parts_of))
        for handle, (entry, parts) in spill.arrays.items():
            spilled = self._spilled(spill, handle, parts)
            is_there = session.directory.entries.get(handle) is entry and entry.is_idle
            if spill.failure is None and spilled is not None and is_there:
                self._out.free(entry.hosts, session.number, (handle,))
                self._launches.reservations.release(entry)
                entry.spill(spilled)
                session.has_spilled = True
            elif spilled is not None:
                self.drop(session, spilled)
        self._out.flush_frees()  # frees the memory before anything is restored under the same handle
        spill.then(spill.failure or OK)

    def _spilled(self, spill: _Spill, handle: int, parts: tuple[SpilledPart, ...]) -> SpilledArray | None:
        """Return the spilled array; None for a view of arrays that are not spilled."""
        if handle not in spill.views:
            pieces = spill.pieces
            return SpilledArray(
                tuple(
                    SpilledPart(pieces[part.piece.number], part.host, part.positions)
                    for part in parts
                    if part.piece.number in pieces
                )
            )
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

        whole = [handle for handle in handles if not _there(entries[handle]).views]
        views = [handle for handle in handles if _there(entries[handle]).views]
        try:
            restores = [_Restore(session, each, entries[each], _there(entries[each]), then, keeps) for each in whole]
            for arrays in _together(restores, places) if keeps else [[each] for each in restores]:
                launch(arrays, _definition(arrays))
            for handle in views:
                entry = entries[handle]
                spilled = _there(entry)
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
                launch([restore], _view_program(_spec(entry), spilled.views, specs), tuple(specs))
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
            devices = _spec(restore.entry).sharding.devices
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
            self._out.to_host(host, m.SendSpilled(session.number, first, tuple(pieces)))
        self._internal.take_credit(session)
        message = m.Launch(program, sources, tuple(each.handle for each in arrays), feeds)
        then = partial(self._all_restored, tuple(arrays), feeds)
        launch = self._launches.launch_to_restore(session, message, then)
        for restore in arrays:
            restore.launch = launch

    def _is_there(self, host: int) -> bool:
        record = self._resources.hosts.get(host)
        return record is not None and self._resources.islands[record.island].works

    def _all_restored(self, arrays: Sequence[_Restore], feeds: tuple[int, ...], launch: Launch) -> None:
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

    def _restored(self, restore: _Restore, feeds: tuple[int, ...], launch: Launch) -> None:
        """Handle the end of a launch that restores one array. Only older dumps have it."""
        self._all_restored((restore,), feeds, launch)

    def failed(self, host: int, message: m.SendSpilledFailed) -> None:
        """Fail the array whose piece cannot be delivered."""
        restore = self._by_feed.get((message.session, message.feed))
        if restore is not None and restore.launch is not None:
            self._launches.fail(restore.launch, message.status)

    def fail_restores(self, session: Session, handles: Iterable[int], status: Status) -> None:
        """Fail the launches that restore these arrays."""
        for handle in handles:
            restore = self._restores.get((session.number, handle))
            if restore is not None and restore.launch is not None:
                self._launches.fail(restore.launch, status)

    def restore_failed(
        self, session: Session, kept: Mapping[int, SpilledArray], losses: Mapping[int, int], status: Status
    ) -> None:
        """Mark arrays of a failed restoration as spilled again.

        An array is lost if one of the hosts with its pieces has lost its memory since `losses` was recorded.
        """
        for restore in list(self._restores.values()):
            if restore.session is session and restore.launch is not None:
                self._launches.fail(restore.launch, status)
        for handle, spilled in kept.items():
            entry = session.directory.entries.get(handle)
            if entry is None or entry.spilled is not None:
                continue
            self._out.free(entry.hosts, session.number, (handle,))
            self._launches.reservations.release(entry)
            if all(self.losses[host] == losses.get(host, 0) for host in spilled.memory_hosts):
                entry.spill(spilled)
            else:
                session.directory.lose(entry, status)
                self.drop(session, spilled)
        self._out.flush_frees()

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

    def refused(self, arrays: Iterable[SpilledArray]) -> None:
        """Drop the files of a session that an earlier cluster suspended on disk, and that does not continue."""
        if self._decisions.drops_later:
            self.drop_files(arrays)

    def _drop(self, session: int, host: int, pieces: tuple[m.SpilledPiece, ...]) -> None:
        """Drop pieces. If the host is not there, its memory is lost, and it removes the files later."""
        if pieces and self._is_there(host):
            self._out.to_host(host, m.DropSpilled(session, pieces))
        elif self._decisions.drops_later:
            left = self._left.setdefault(host, {})
            left.update((piece.path, None) for piece in pieces if piece.path)
            for path in list(islice(left, max(0, len(left) - MOST_LEFT))):
                del left[path]

    def island_ready(self, ready: IslandReady | IslandRestarted) -> None:
        """Remove the files that were dropped while their hosts were not there."""
        for host in self._resources.hosts_of(ready.island) if self._left else ():
            paths = iter(self._left.pop(host, {}))
            while some := tuple(m.SpilledPiece(0, path=path) for path in islice(paths, _MOST_DROPPED)):
                self._out.to_host(host, m.DropSpilled(0, some))

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

    def hosts_failed(self, hosts: set[int], status: Status) -> None:
        """Fail the pending copies of these hosts, and the arrays whose pieces were in their memory."""
        self.losses.update(hosts)
        for restore in list(self._restores.values()):
            if restore.launch is not None and not hosts.isdisjoint(restore.spilled.memory_hosts):
                self._launches.fail(restore.launch, status.within(restore.entry.producer))
        for session in self._sessions.values():
            for entry in session.directory.entries.values() if session.has_spilled else ():
                if entry.spilled is not None and not hosts.isdisjoint(entry.spilled.memory_hosts):
                    self.drop(session, entry.spilled)
                    session.directory.lose(entry, status.within(entry.producer))
                    session.note_error(status)
        for request, save in list(self._saves.items()):
            if save.left & hosts:
                save.failure = save.failure or status
                save.left -= hosts
                if not save.left:
                    self._save_done(request, save)
        for request, spill in list(self._spills.items()):
            if spill.left & hosts:
                spill.failure = spill.failure or status
                spill.left -= hosts
                if not spill.left:
                    self._spill_done(request, spill)


def _check_kind(handle: int, entry: Entry) -> None:
    if entry.spec is None or isinstance(entry.spec.sharding.tiling, Opaque):
        raise unimplemented(f"array {handle}, made by {entry.producer!r}, is of a kind that cannot be spilled")


def _there(entry: Entry) -> SpilledArray:
    assert entry.spilled is not None
    return entry.spilled


def _contents(spec: ArraySpec, position: int) -> object:
    """Return a value that is equal for shards with the same contents, as far as the sharding determines it."""
    if isinstance(spec.sharding.tiling, Replicated):
        return ()
    return shard_boxes(spec.sharding, spec.shape)[position] if isinstance(spec.sharding.tiling, Tiled) else position


def _together(arrays: Iterable[_Restore], places: Placement) -> Iterator[list[_Restore]]:
    """Yield the arrays that one launch restores: few or small ones on the same islands, or a single one."""
    groups: dict[frozenset[int], tuple[list[_Restore], int]] = {}
    for restore in arrays:
        islands = frozenset([places[device].island for device in _spec(restore.entry).sharding.devices])
        group, nbytes = groups.get(islands, ([], 0))
        nbytes += restore.spilled.nbytes
        if group and (nbytes > _MOST_TOGETHER_BYTES or len(group) == MOST_TOGETHER):
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
        spec = _spec(restore.entry)
        for part in restore.spilled.parts:
            shape = shard_shape(spec.sharding, spec.shape, part.positions[0])
            buffers.append(ir.HostBuffer(len(buffers), shape, None, part.positions, output))
    node = ir.HostToDevice(tuple(buffers), tuple(_spec(each.entry) for each in arrays))
    return ir.single("bring back", (), node, feeds=len(buffers))


def _views_of(entries: Mapping[int, Entry], locations: Mapping[int, DeviceLocation]) -> dict[int, tuple[Shard, ...]]:
    """Return the arrays whose memory all belongs to others of these arrays, with the source of each shard.

    No array is a view of a view.
    """
    sharing = [each for each in entries.items() if any(block.users > 1 for block in each[1].blocks)]
    sharing.sort(key=lambda each: (-len(_spec(each[1]).sharding.devices), each[0]))
    known: dict[tuple[int, DeviceLocation], tuple[Shard, object]] = {}
    views: dict[int, tuple[Shard, ...]] = {}
    for handle, entry in sharing:
        spec = _spec(entry)
        own: dict[tuple[int, DeviceLocation], tuple[Shard, object]] = {}
        sources: list[Shard] = []
        for position, device in enumerate(spec.sharding.devices):
            block = _block_on(entry, locations[device])
            if block is None:
                continue
            key, kind = (id(block), locations[device]), _kind(spec, position)
            own[key] = (handle, position), kind
            source = known.get(key)
            if source is not None and source[1] == kind:
                sources.append(source[0])
        if len(sources) == len(spec.sharding.devices):
            views[handle] = tuple(sources)
        else:
            known.update((key, value) for key, value in own.items() if key not in known)
    return views


def _view_program(spec: ArraySpec, sources: tuple[Shard, ...], specs: Mapping[int, ArraySpec]) -> ir.Program:
    """Return a program that makes an array of shards of others. Its arguments are in the order of `specs`."""
    arguments = list(specs)
    mappings = tuple(
        ir.Mapping(arguments.index(handle), 0, (shard, shard + 1, 1), (position, position + 1, 1))
        for position, (handle, shard) in enumerate(sources)
    )
    node = ir.Rearrange(tuple(range(len(arguments))), (spec,), mappings)
    return ir.single("bring back a view", tuple(specs.values()), node)


def _spec(entry: Entry) -> ArraySpec:
    assert entry.spec is not None
    return entry.spec


def _block_on(entry: Entry, location: DeviceLocation) -> Block | None:
    """Return the block with the array's memory at this location, or None unless there is exactly one."""
    where = (location.host, location.ordinal)
    found = [block for block in entry.blocks if any(device == where for device, _ in block.requirement)]
    return found[0] if len(found) == 1 else None


def _kind(spec: ArraySpec, position: int) -> object:
    """Return a value that is equal for shards that can be views of each other."""
    shape = shard_shape(spec.sharding, spec.shape, position)
    return spec.dtype, shape, spec.layout, spec.sharding.memory_kind
