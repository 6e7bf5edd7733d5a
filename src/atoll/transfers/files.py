"""Transfers of files on one machine: the descriptor travels, and the receiver copies the bytes out of the file.

The file is a client's, who can change and shorten it at any time. So it is read, once, into memory of the receiver's
own, and never mapped: that copy is the only one on the way.
"""

from __future__ import annotations

import os
import stat

from atoll.errors import FrameError
from atoll.transfers.contents import FileContents, read_file
from atoll.transfers.engine import Contents, Piece, Received, TransferEngine, nothing_to_release
from atoll.transfers.frame_socket import FrameSocket
from atoll.transfers.host_memory import aligned


class FilePiece(Piece, frozen=True, array_like=True, tag="f"):
    """The first `nbytes` of the file whose descriptor comes with the frame."""


class FileEngine(TransferEngine):
    """Hands on files by their descriptors; unix sockets only."""

    frames = (FilePiece,)

    def __init__(self, socket: FrameSocket) -> None:
        self._socket = socket

    @classmethod
    def reaches(cls, socket: FrameSocket) -> bool:
        return socket.is_unix

    def takes(self, contents: Contents) -> bool:
        return type(contents) is FileContents

    def send(self, session: int, feed: int, contents: Contents, more: bool) -> None:
        assert isinstance(contents, FileContents)
        self._socket.send(FilePiece(session, feed, contents.nbytes, more), (), contents.descriptor)

    def handle(self, frame: FilePiece, descriptor: int | None) -> Received:
        if descriptor is None:
            raise FrameError("a file was announced without its descriptor")
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):  # a pipe could keep this thread waiting
            raise FrameError("a descriptor was announced as a file and is none")
        if found.st_size < frame.nbytes:
            raise FrameError(f"a file has {found.st_size} bytes instead of the {frame.nbytes} that were announced")
        content = aligned(frame.nbytes)
        read_file(descriptor, content.data)
        return content, nothing_to_release
