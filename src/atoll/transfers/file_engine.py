"""Transfers of files on one machine. The sender passes the descriptor, and the receiver reads the file.

The client that owns the file can change or shorten it at any time. So the receiver reads it once into its own memory,
which is the only copy. A receiver that serves only that client maps the file instead.

A file that exceeds the receiver's budget stays unread, in memory that counts for the client.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import threading
from functools import partial
from typing import Any

import numpy as np

from atoll.cluster.processes.process_table import has_memory_for
from atoll.errors import Code, Details, FrameError, Kind, Status, StatusError, failed
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import aligned
from atoll.transfers.piece_contents import FileContents, read_file
from atoll.transfers.transfer_engine import Arrivals, Contents, Piece, Received, TransferEngine, nothing_to_release

_log = logging.getLogger(__name__)

# Files that wait for the budget, each with an open descriptor. If there are more, they are read at once, or fail if
# this machine has no memory for them.
MAX_WAITING = 256


class FilePiece(Piece, frozen=True, array_like=True, tag="f"):
    """The piece is the first `nbytes` of the file whose descriptor accompanies the frame.

    `launch` is as in `StreamPiece`.
    """

    launch: int = 0


class _Waiting:
    """A file that may have to wait for the budget. Guarded by the lock of its engine."""

    __slots__ = ("descriptor", "is_granted", "is_refused", "piece")

    def __init__(self, piece: FilePiece) -> None:
        self.piece = piece
        self.descriptor = -1  # a duplicate, once the file waits
        self.is_granted = False
        self.is_refused = False


class FileEngine(TransferEngine):
    """Sends files by their descriptors, on unix sockets only."""

    frames = (FilePiece,)

    max_waiting = MAX_WAITING
    has_memory = staticmethod(has_memory_for)

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket
        self._arrivals: Arrivals | None = None
        self._lock = threading.Lock()
        self._waiting: set[_Waiting] = set()
        self._closed = False

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        return socket.is_unix

    def takes(self, contents: Contents) -> bool:
        return type(contents) is FileContents

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        assert isinstance(contents, FileContents)
        piece = FilePiece(session, feed, contents.nbytes, more, contents.launch)
        self._socket.send(piece, (), contents.descriptor)

    def receive_for(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def handle(self, frame: FilePiece, descriptor: int | None) -> Received | None:
        if descriptor is None:
            raise FrameError("a file was announced without its descriptor")
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):  # a pipe could block this thread
            raise FrameError("a descriptor that was announced as a file is not one")
        if found.st_size < frame.nbytes:
            # The client may have shortened the file after the peer sent the frame, so only this piece fails.
            text = f"a file has {found.st_size} bytes instead of the {frame.nbytes} that were announced"
            raise failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS))
        if self._arrivals is None:
            return self._contents(descriptor, frame.nbytes), nothing_to_release
        if len(self._waiting) >= self.max_waiting:
            if not self.has_memory(frame.nbytes):
                raise StatusError(
                    Code.RESOURCE_EXHAUSTED,
                    f"{self.max_waiting} files wait at this host, which has too little memory for one more",
                )
            return self._contents(descriptor, frame.nbytes), nothing_to_release
        if not self._may_come(frame, descriptor):
            return None
        try:
            return self._contents(descriptor, frame.nbytes), nothing_to_release
        except (StatusError, MemoryError):
            self._arrivals.withdraw(frame)
            raise

    # ---- waiting for the budget

    def _may_come(self, piece: FilePiece, descriptor: int) -> bool:
        """Return whether the file may be read now. If not, a thread reads it once the budget admits it."""
        assert self._arrivals is not None
        waiting = _Waiting(piece)
        self._arrivals.admit(piece, piece.launch, partial(self._granted, waiting), partial(self._refused, waiting))
        with self._lock:
            is_granted, is_over = waiting.is_granted, self._closed or waiting.is_refused
            if not (is_granted or is_over):
                waiting.descriptor = os.dup(descriptor)
                self._waiting.add(waiting)
        if is_over and not is_granted:  # the channel has ended, or the file was refused
            self._arrivals.withdraw(piece)
        return is_granted

    def _granted(self, waiting: _Waiting) -> None:
        with self._lock:
            waiting.is_granted = True
            if waiting not in self._waiting:
                return
        # The thread that released memory must not wait until the file has been read.
        threading.Thread(target=self._take, args=(waiting,), name="atoll-file", daemon=True).start()

    def _refused(self, waiting: _Waiting, status: Status) -> None:
        assert self._arrivals is not None
        with self._lock:
            waiting.is_refused = True
            was_waiting = waiting in self._waiting
            self._waiting.discard(waiting)
        if was_waiting:
            os.close(waiting.descriptor)
        self._arrivals.fail(waiting.piece, status)

    def _take(self, waiting: _Waiting) -> None:
        arrivals, piece = self._arrivals, waiting.piece
        assert arrivals is not None
        with self._lock:
            if waiting not in self._waiting:  # the channel has ended
                return
            self._waiting.remove(waiting)
        try:
            content = self._contents(waiting.descriptor, piece.nbytes)
        except (StatusError, MemoryError) as error:
            text = f"this host has no memory for a file of {piece.nbytes} bytes"
            status = error.status if isinstance(error, StatusError) else Status(Code.RESOURCE_EXHAUSTED, text)
            arrivals.withdraw(piece)
            arrivals.fail(piece, status)
        else:
            self._deliver(arrivals, piece, content)
        finally:
            os.close(waiting.descriptor)

    def _deliver(self, arrivals: Arrivals, piece: FilePiece, content: Any) -> None:
        """Deliver a file that has waited. An error ends the channel, and not this process."""
        try:
            arrivals.take(piece, content, nothing_to_release)
        except StatusError as error:  # another piece of the feed has arrived meanwhile, and the session has too many
            _log.warning("a data channel ends: %s", error)
            self._socket.shut_down()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, set()
        for each in waiting:
            os.close(each.descriptor)
            if self._arrivals is not None:
                self._arrivals.withdraw(each.piece)

    # ---- the bytes of a file

    def _contents(self, descriptor: int, nbytes: int) -> Any:
        """Return the first `nbytes` of a file, in a writable buffer.

        Raise StatusError (DATA_LOSS) if the file is shorter or cannot be read. The peer may have opened it for writing.
        """
        content = aligned(nbytes)
        try:
            read_file(descriptor, content.data)
        except OSError as error:
            text = f"a file of {nbytes} bytes cannot be read: {error.strerror}"
            raise failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS)) from None
        return content


class MappedFileEngine(FileEngine):
    """The kind for a receiver that serves only one client: it maps files, which saves the copy and its fresh pages.

    If a client shortens its file before the bytes have been read, the receiver dies of SIGBUS. So never use this kind
    if that could harm another client.
    """

    def _contents(self, descriptor: int, nbytes: int) -> Any:
        if not nbytes:
            return aligned(0)
        try:
            mapped = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)  # writes do not reach the file
        except (OSError, ValueError) as error:
            text = f"a file of {nbytes} bytes cannot be mapped: {error}"
            raise failed(Code.DATA_LOSS, text, Details(Kind.CONTENTS)) from None
        return np.frombuffer(mapped, np.uint8)
