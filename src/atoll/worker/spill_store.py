"""Stores spilled arrays in this host's memory or in files, so that they take no device memory.

A *piece* is the contents of one shard. Threads copy pieces, several at a time. A piece returns as a feed to any host,
where an ordinary program makes an array from it. The controller decides order and memory (`migration.array_spiller`).

Invariant: a piece that was reported as spilled remains complete until it is dropped or its session's store is closed.
Files outlive this process. The controller knows their paths, sizes and checksums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from atoll.cluster.processes.bugs import start_in
from atoll.cluster.processes.process_table import has_memory_for
from atoll.devices.device import DeviceBackend
from atoll.errors import OK, Code, Details, Kind, Status, StatusError, failed, status_of
from atoll.host_services import host_data
from atoll.protocol import messages as m
from atoll.quantities import human_bytes
from atoll.transfers.inbox import Inbox
from atoll.transfers.piece_contents import BufferContents, as_views
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS
from atoll.worker import spill_files
from atoll.worker.future_arrays import live_array
from atoll.worker.host_network import SendPort, send_to_host
from atoll.worker.store import MemoryHolds, Store

THREADS = 4  # per host; more would not be faster, because these saturate a disk or the memory
_REMOVAL_SECONDS = 0.5


class _Spill:
    """The progress of one SpillRequest, until its last piece is copied."""

    def __init__(self, message: m.SpillRequest, started: float) -> None:
        self.message = message
        self.started = started
        self.left = len(message.shards)
        self.failure: Status | None = None
        self.pieces: list[m.SpilledPiece] = []
        self.file = spill_files.SharedFile(message.directory) if message.are_dropped_together else None

    def write(self, number: int, contents: memoryview) -> m.SpilledPiece:
        """Write a piece to a file. Raise StatusError if that fails."""
        if self.file is not None and contents.nbytes <= spill_files.MAX_SHARED_BYTES:
            return self.file.write(number, contents)
        return spill_files.write(self.message.directory, number, contents)

    def finish(self, host: int) -> None:
        """Make the files complete, so that they survive a loss of power. Raise StatusError if that fails."""
        message = self.message
        if self.file is not None:
            self.file.finish()
        if message.manifest:
            spill_files.write_manifest(message.directory, host, message.manifest, self.pieces)
        spill_files.sync(message.directory)

    def remove(self) -> None:
        """Remove the file that pieces share, and the directory unless it has other pieces."""
        if self.file is not None:
            self.file.remove()
        if self.message.to_files:
            spill_files.remove_unused(self.message.directory)


class SpillStore:
    """Copies, delivers and drops pieces. `report` sends messages to the controller, from any thread.

    Only the executor's thread calls `spill`. Any thread may call the other methods.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        inbox: Inbox,
        port: SendPort,
        host: int,
        holds: MemoryHolds,
        report: Callable[..., None],
        pool: Pool | None = None,
        has_memory: Callable[[int], bool] = has_memory_for,
    ) -> None:
        self._backend = backend
        self._inbox = inbox
        self._port = port
        self._host = host
        self._holds = holds
        self._report = report
        self._has_memory = has_memory
        self._pool = pool or ThreadPoolExecutor(THREADS, "atoll-spill")
        self._lock = threading.Lock()
        self._removals: list[Future[None]] = []
        self._memory: dict[int, dict[int, Any]] = {}  # contents by session and piece

    # ---- spilling

    def spill(self, message: m.SpillRequest, store: Store | None) -> None:
        """Start to copy pieces, and report when all are copied. Work that was sent earlier has been enqueued."""
        spill = _Spill(message, time.monotonic())
        if store is None:
            self._report(
                m.SpillReply(message.session, message.request, Status(Code.CANCELLED, "the session has ended"))
            )
            return
        copies: list[tuple[int, Any, Callable[[], None]]] = []
        try:
            if message.to_files:
                spill_files.make_directory(message.directory)
            for number, handle, shard in message.shards:
                buffer = store.get(handle)
                shards = self._backend.shards(live_array(buffer))
                copies.append((number, shards[shard], self._holds.hold(buffer, len(shards))))
        except Exception as error:
            for _, _, release in copies:
                release()
            spill.remove()
            self._report(m.SpillReply(message.session, message.request, status_of(error)))
            return
        with self._lock:
            self._memory.setdefault(message.session, {})
        for number, shard, release in copies:
            start_in(self._pool, self._copy, spill, number, shard, release)
        if not copies:
            self._finish(spill)

    def _copy(self, spill: _Spill, number: int, shard: Any, release: Callable[[], None]) -> None:
        piece, failure = None, None
        try:
            if spill.failure is None:
                piece = self._spill_piece(spill, number, np.asarray(shard))
        except Exception as error:
            failure = status_of(error)
        finally:
            del shard
            release()
        with self._lock:
            spill.left -= 1
            spill.failure = spill.failure or failure
            if piece is not None:
                spill.pieces.append(piece)
            is_last = not spill.left
        if is_last:
            self._finish(spill)

    def _spill_piece(self, spill: _Spill, number: int, contents: np.ndarray[Any, Any]) -> m.SpilledPiece:
        message, view = spill.message, contents_of(contents)
        if message.to_files:
            return spill.write(number, view)
        # The arrays exist until all pieces are copied. If memory ran out, the system would kill this process.
        if not self._has_memory(view.nbytes):
            text = f"host {self._host} has too little memory left to spill {human_bytes(view.nbytes)} more"
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{text}: spill to files instead (atoll suspend --to disk)")
        if contents.dtype.kind == "T":
            copy: Any = view
        else:
            copy = RECEIVE_BUFFERS.take(view.nbytes)
            copy[:] = np.frombuffer(view, np.uint8)
        with self._lock:
            own = self._memory.get(message.session)
            if own is not None:  # None if the session has ended
                own[number] = copy
        return m.SpilledPiece(number, view.nbytes)

    def _finish(self, spill: _Spill) -> None:
        message, status = spill.message, spill.failure or OK
        if status.ok and message.to_files:
            try:
                spill.finish(self._host)
            except StatusError as error:
                status = error.status
        if not status.ok:
            spill.remove()
            self.drop(m.DropSpilled(message.session, tuple(spill.pieces)))
            spill.pieces = []
        seconds = time.monotonic() - spill.started
        self._report(m.SpillReply(message.session, message.request, status, tuple(spill.pieces), seconds))

    # ---- restoring

    def send(self, message: m.SendSpilled) -> None:
        """Send pieces as feeds to this host or others, without blocking."""
        for piece, feed, hosts in message.pieces:
            if self._host in hosts:
                grant = self._task(self._deliver, message.session, piece, feed)
                self._inbox.admit(message.session, feed, piece.nbytes, message.launch, grant)
            others = tuple(host for host in hosts if host != self._host)
            if others:
                self._task(self._send, message.session, piece, feed, others)()

    def _task(self, call: Callable[..., None], session: int, piece: m.SpilledPiece, feed: int, *more: Any) -> Any:
        def run() -> None:
            try:
                call(session, piece, feed, *more)
            except Exception as error:
                self._report(m.SendSpilledFailed(session, feed, status_of(error)))

        return lambda: start_in(self._pool, run)

    def _deliver(self, session: int, piece: m.SpilledPiece, feed: int) -> None:
        try:
            content = self._read(session, piece)
        except BaseException:
            self._inbox.withdraw(session, feed)
            raise
        self._inbox.put(session, feed, content)

    def _send(self, session: int, piece: m.SpilledPiece, feed: int, hosts: Sequence[int]) -> None:
        content = memoryview(self._read(session, piece))
        for host in hosts:
            send_to_host(self._port, self._host, host, session, feed, BufferContents(as_views([content])))

    def _read(self, session: int, piece: m.SpilledPiece) -> Any:
        """Return the contents of the piece. Raise DATA_LOSS if they are not what was spilled."""
        if piece.path:
            return spill_files.read(piece)
        with self._lock:
            content = self._memory.get(session, {}).get(piece.number)
        if content is None:
            text = f"spilled piece {piece.number} is not in the memory of host {self._host}"
            raise failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS))
        return content

    # ---- the end

    def drop(self, message: m.DropSpilled) -> None:
        """Free the memory of pieces that are no longer needed, and remove their files."""
        with self._lock:
            own = self._memory.get(message.session, {})
            for piece in message.pieces:
                own.pop(piece.number, None)
        files = [piece for piece in message.pieces if piece.path]
        if files:
            self._remove(spill_files.remove, files)

    def remove_unlisted(self, message: m.KeepFiles) -> None:
        """Remove the directories of published arrays that the message does not list, because no version has them."""
        self._remove(spill_files.remove_others, message.prefix, message.before, frozenset(message.numbers))

    def _remove(self, remove: Callable[..., None], *arguments: Any) -> None:
        self._removals.append(self._pool.submit(remove, *arguments))
        self._removals = [each for each in self._removals if not each.done()]

    def finish(self) -> None:
        """Wait briefly for the removal of files, before the process ends."""
        wait(self._removals, _REMOVAL_SECONDS)

    def close_session(self, session: int) -> None:
        """Free the pieces of a session that has ended. The controller drops its files by their paths."""
        with self._lock:
            self._memory.pop(session, None)

    @property
    def nbytes(self) -> int:
        """The bytes of pieces in this host's memory."""
        with self._lock:
            return sum(len(each) for own in self._memory.values() for each in own.values())


def contents_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes that a feed would carry for the array."""
    if array.dtype.kind == "T":
        return memoryview(host_data.encode_strings(array))
    return memoryview(host_data.bytes_of(np.ascontiguousarray(array)))
