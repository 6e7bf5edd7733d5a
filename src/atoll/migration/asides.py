"""Arrays that are put aside, and brought back: one mechanism for sessions that are suspended and for arrays that spill.

To put an array aside, the hosts that have it copy what its shards hold to their memory or to files (`worker.asides`).
Only when all of them have done so is its device memory freed, so what fails on the way leaves it as it was. It comes
back by an ordinary launch: a program that makes an array out of host buffers, whose feeds are what was put aside. So it
takes memory in the islands' order, waits for it like any other, and what needs it stands behind it in its session's
lines; and the places where it comes back need not be those where it was.

Pure. Invariant: a logical buffer is on devices, or aside, or on its way back, and its directory entry is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from atoll.cluster.locations import Placement
from atoll.cluster.resources import ResourceManager
from atoll.errors import OK, Code, Status, unimplemented
from atoll.ir import program as ir
from atoll.ir.types import ArraySpec, Opaque, Replicated, Tiled, shard_boxes, shard_shape
from atoll.migration.controller import Launches, Out
from atoll.migration.own_programs import OwnPrograms
from atoll.migration.shared_memory import Shard, view_program, views_of
from atoll.protocol import messages as m
from atoll.scheduling.asides import Aside, AsidePart
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.session import Launch, Session

# Feeds of what comes back: above those of proxies, below those between hosts.
_FIRST_FEED = m.OWN_NUMBERS >> 1


@dataclass(eq=False)
class _Putting:
    """Arrays that are being put aside. `then(status)` is called once all hosts have answered."""

    session: Session
    arrays: dict[int, tuple[Entry, tuple[AsidePart, ...]]]  # by handle
    views: dict[int, tuple[Shard, ...]]  # of these
    left: set[int]  # hosts
    then: Callable[[Status], None]
    pieces: dict[int, m.AsidePiece] = field(default_factory=dict)  # by number
    failure: Status | None = None


@dataclass(eq=False)
class _Coming:
    """An array on its way back. With `keeps`, what is aside stays until somebody drops it."""

    session: Session
    handle: int
    entry: Entry
    aside: Aside
    then: Callable[[int, Status], None] | None
    keeps: bool
    launch: Launch | None = None


def _no_manifest(arrays: Mapping[int, Aside]) -> bytes:
    return b""


class Asides:
    """Puts arrays of sessions aside, and brings them back."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        resources: ResourceManager,
        launches: Launches,
        own: OwnPrograms,
        out: Out,
    ) -> None:
        self._sessions = sessions
        self._resources = resources
        self._launches = launches
        self._own = own
        self._out = out
        self._putting: dict[int, _Putting] = {}  # by request
        self._coming: dict[tuple[int, int], _Coming] = {}  # by session and handle
        self.losses: Counter[int] = Counter()  # of each host, with what it had in memory
        self._by_feed: dict[tuple[int, int], _Coming] = {}  # by session and feed
        self._next_request = 1
        self.next_piece = 1
        self._next_feed = _FIRST_FEED

    # ---- putting aside

    def put(
        self,
        session: Session,
        handles: Iterable[int],
        then: Callable[[Status], None],
        directory: str = "",
        manifest: Callable[[Mapping[int, Aside]], bytes] = _no_manifest,
    ) -> None:
        """Puts these arrays aside, in files with a `directory`: all of them, or none. Those that are used meanwhile
        stay.

        Raises UNIMPLEMENTED for an array that has no known shards.
        """
        entries = {handle: session.directory.entries[handle] for handle in handles}
        for handle, entry in entries.items():
            _check_kind(handle, entry)
        views = views_of(entries, session.devices.locations)
        arrays: dict[int, tuple[Entry, tuple[AsidePart, ...]]] = {}
        shards: dict[int, list[tuple[int, int, int]]] = {}  # by host
        for handle, entry in sorted(entries.items(), key=lambda each: each[0] in views):  # views after the others
            parts = self._parts(session, entry) if handle not in views else []
            arrays[handle] = (entry, tuple(part for part, _ in parts))
            for part, shard in parts:
                shards.setdefault(part.host, []).append((part.piece.number, handle, shard))
        request = self._next_request
        self._next_request += 1
        self._putting[request] = putting = _Putting(session, arrays, views, set(shards), then)
        asides = {handle: Aside(parts, views.get(handle, ())) for handle, (_, parts) in arrays.items()}
        text = manifest(asides) if directory else b""
        for host, some in sorted(shards.items()):
            self._out.to_host(host, m.PutAside(session.number, request, tuple(some), bool(directory), directory, text))
        if not shards:
            self._put_done(request, putting)

    def _parts(self, session: Session, entry: Entry) -> list[tuple[AsidePart, int]]:
        """What is to be kept of an array, each with the number of one of its host's shards that holds it."""
        spec = entry.spec
        assert spec is not None
        same: dict[tuple[int, object], list[int]] = {}
        first: dict[tuple[int, object], int] = {}
        counts: dict[int, int] = {}
        for position, device in enumerate(spec.sharding.devices):
            host = session.devices.locations[device].host
            key = (host, _contents(spec, position))
            first.setdefault(key, counts.get(host, 0))
            counts[host] = counts.get(host, 0) + 1
            same.setdefault(key, []).append(position)
        parts = []
        for key, positions in same.items():
            parts.append((AsidePart(m.AsidePiece(self.next_piece), key[0], tuple(positions)), first[key]))
            self.next_piece += 1
        return parts

    def put_on(self, host: int, message: m.AsidePut) -> None:
        """A host has copied its part, or failed to."""
        putting = self._putting.get(message.request)
        if putting is None or host not in putting.left:
            self._drop(message.session, host, message.pieces)
            return
        putting.left.discard(host)
        putting.pieces.update((piece.number, piece) for piece in message.pieces)
        if not message.status.ok:
            putting.failure = putting.failure or message.status
        if not putting.left:
            self._put_done(message.request, putting)

    def _put_done(self, request: int, putting: _Putting) -> None:
        del self._putting[request]
        session = putting.session
        for handle, (entry, parts) in putting.arrays.items():
            aside = self._aside(putting, handle, parts)
            is_there = session.directory.entries.get(handle) is entry and entry.is_idle
            if putting.failure is None and aside is not None and is_there:
                self._out.free(entry.hosts, session.number, (handle,))
                self._launches.memory.release(entry)
                entry.aside, entry.hosts = aside, ()
                session.has_asides = True
            elif aside is not None:
                self.drop(session, aside)
        self._out.flush_frees()  # what lies there goes before anything comes back under its handle
        putting.then(putting.failure or OK)

    def _aside(self, putting: _Putting, handle: int, parts: tuple[AsidePart, ...]) -> Aside | None:
        """What is kept of an array now; None for a view of what is not aside."""
        if handle not in putting.views:
            pieces = putting.pieces
            return Aside(
                tuple(
                    AsidePart(pieces[part.piece.number], part.host, part.positions)
                    for part in parts
                    if part.piece.number in pieces
                )
            )
        sources = {source for source, _ in putting.views[handle]}
        asides = [putting.arrays[source][0].aside for source in sources]
        if any(each is None for each in asides):
            return None
        hosts = {host for each in asides if each is not None for host in each.memory_hosts}
        return Aside((), putting.views[handle], tuple(sorted(hosts)))

    def cancel(self, session: Session, status: Status) -> None:
        """What is being put aside of the session stays on its devices."""
        for putting in self._putting.values():
            if putting.session is session:
                putting.failure = putting.failure or status

    # ---- bringing back

    def bring_back(
        self,
        session: Session,
        handles: Iterable[int],
        then: Callable[[int, Status], None] | None = None,
        places: Placement | None = None,
        keeps: bool = False,
    ) -> None:
        """Launches what makes these arrays again, at the session's places, or at others. `then(handle, status)` is
        called for each when that has ended.

        Raises StatusError where an array cannot be there.
        """
        places = session.devices.locations if places is None else places
        entries = session.directory.entries
        programs: dict[ir.Program, int] = {}
        try:
            for handle in sorted(handles, key=lambda each: bool(_there(entries[each]).views)):  # views after the others
                entry = entries[handle]
                aside, spec = _there(entry), entry.spec
                assert spec is not None
                sources = {source: entries[source].spec for source, _ in aside.views if source in entries}
                specs = {source: each for source, each in sources.items() if each is not None}
                if aside.views:
                    if len(specs) < len({source for source, _ in aside.views}):  # only a proxy that lies releases them
                        entry.aside, entry.error = None, Status(Code.DATA_LOSS, "what it was a part of is gone")
                        if then is not None:
                            then(handle, entry.error)
                        continue
                    definition = view_program(spec, aside.views, specs)
                else:
                    definition = _definition(spec, tuple(part.positions for part in aside.parts))
                if definition not in programs:
                    programs[definition] = self._own.make(session, definition, places)
                coming = _Coming(session, handle, entry, aside, then, keeps)
                self._launch(coming, programs[definition], tuple(specs), places)
        finally:
            for number in programs.values():
                self._own.drop(session, number)

    def _launch(self, coming: _Coming, program: int, sources: tuple[int, ...], places: Placement) -> None:
        session, aside, spec = coming.session, coming.aside, coming.entry.spec
        assert spec is not None
        first, count = self._next_feed, len(aside.parts)
        self._next_feed += count
        feeds = tuple(range(first, first + count))
        self._coming[session.number, coming.handle] = coming
        self._by_feed.update(((session.number, feed), coming) for feed in feeds)
        coming.entry.aside = None
        by_host: dict[int, list[tuple[m.AsidePiece, int, tuple[int, ...]]]] = {}
        for part, feed in zip(aside.parts, feeds, strict=True):
            hosts = tuple(sorted({places[spec.sharding.devices[position]].host for position in part.positions}))
            keeper = part.host if self._is_there(part.host) else hosts[0]  # who may see the same files
            by_host.setdefault(keeper, []).append((part.piece, feed, hosts))
        for host, pieces in sorted(by_host.items()):
            self._out.to_host(host, m.SendAside(session.number, first, tuple(pieces)))
        self._own.take_credit(session)
        launch = m.Launch(program, sources, (coming.handle,), feeds)
        coming.launch = self._launches.launch_again(session, launch, partial(self._came, coming, feeds))

    def _is_there(self, host: int) -> bool:
        record = self._resources.hosts.get(host)
        return record is not None and self._resources.islands[record.island].works

    def _came(self, coming: _Coming, feeds: tuple[int, ...], launch: Launch) -> None:
        number = coming.session.number
        for feed in feeds:
            self._by_feed.pop((number, feed), None)
        if self._coming.get((number, coming.handle)) is coming:
            del self._coming[number, coming.handle]
        if not coming.keeps:
            self.drop(coming.session, coming.aside)
        if coming.then is not None:
            coming.then(coming.handle, launch.error or OK)

    def failed(self, host: int, message: m.AsideFailed) -> None:
        """A piece cannot be delivered: its array cannot be made."""
        coming = self._by_feed.get((message.session, message.feed))
        if coming is not None and coming.launch is not None:
            self._launches.fail(coming.launch, message.status)

    def take_back(self, session: Session, kept: Mapping[int, Aside], losses: Mapping[int, int], status: Status) -> None:
        """Arrays that were to come back are aside again: what was kept of them still is, unless one of its hosts was
        lost since there were so many `losses`.
        """
        for coming in list(self._coming.values()):
            if coming.session is session and coming.launch is not None:
                self._launches.fail(coming.launch, status)
        for handle, aside in kept.items():
            entry = session.directory.entries.get(handle)
            if entry is None or entry.aside is not None:
                continue
            self._out.free(entry.hosts, session.number, (handle,))
            self._launches.memory.release(entry)
            if all(self.losses[host] == losses.get(host, 0) for host in aside.memory_hosts):
                entry.aside, entry.error, entry.ready, entry.hosts = aside, None, True, ()
            else:
                entry.error, entry.ready = entry.error or status, True
                self.drop(session, aside)
        self._out.flush_frees()

    # ---- the end

    def drop(self, session: Session, aside: Aside) -> None:
        """Nobody needs what is aside any more."""
        for host, pieces in aside.by_host():
            self._drop(session.number, host, pieces)

    def _drop(self, session: int, host: int, pieces: tuple[m.AsidePiece, ...]) -> None:
        if pieces and self._is_there(host):
            self._out.to_host(host, m.DropAside(session, pieces))

    def session_closed(self, session: Session) -> None:
        """What it has in files goes, too; what is in memory goes with its stores."""
        for entry in session.directory.entries.values() if session.has_asides else ():
            if entry.aside is not None and entry.aside.in_files:
                self.drop(session, entry.aside)
        for table in (self._coming, self._by_feed):
            for key in [key for key in table if key[0] == session.number]:
                del table[key]
        for request, putting in list(self._putting.items()):
            if putting.session is session:
                del self._putting[request]

    def hosts_lost(self, hosts: set[int], status: Status) -> None:
        """What these hosts were to copy will not be, and what they had in memory is lost."""
        self.losses.update(hosts)
        for coming in list(self._coming.values()):
            if coming.launch is not None and not hosts.isdisjoint(coming.aside.memory_hosts):
                self._launches.fail(coming.launch, status.within(coming.entry.maker))
        for session in self._sessions.values():
            for entry in session.directory.entries.values() if session.has_asides else ():
                if entry.aside is not None and not hosts.isdisjoint(entry.aside.memory_hosts):
                    self.drop(session, entry.aside)
                    entry.aside = None
                    entry.error = entry.error or status.within(entry.maker)
                    session.has_errors = True
        for request, putting in list(self._putting.items()):
            if putting.left & hosts:
                putting.failure = putting.failure or status
                putting.left -= hosts
                if not putting.left:
                    self._put_done(request, putting)


def _check_kind(handle: int, entry: Entry) -> None:
    if entry.spec is None or isinstance(entry.spec.sharding.tiling, Opaque):
        raise unimplemented(f"array {handle}, made by {entry.maker!r}, is of a kind that cannot be put aside")


def _there(entry: Entry) -> Aside:
    assert entry.aside is not None
    return entry.aside


def _contents(spec: ArraySpec, position: int) -> object:
    """Equal for shards that hold the same, as far as the sharding says."""
    if isinstance(spec.sharding.tiling, Replicated):
        return ()
    return shard_boxes(spec.sharding, spec.shape)[position] if isinstance(spec.sharding.tiling, Tiled) else position


def _definition(spec: ArraySpec, groups: tuple[tuple[int, ...], ...]) -> ir.Program:
    """Makes an array of one host buffer for each group of positions."""
    buffers = tuple(
        ir.HostBuffer(feed, shard_shape(spec.sharding, spec.shape, positions[0]), None, positions)
        for feed, positions in enumerate(groups)
    )
    return ir.single("bring back", (), ir.HostToDevice(buffers, (spec,)), feeds=len(groups))
