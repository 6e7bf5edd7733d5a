"""Transfers of files on one machine: the descriptor travels, and the receiver takes the bytes from the file.

The file is a client's, who can change and shorten it at any time. So it is read, once, into memory of the receiver's
own: that copy is the only one on the way. Where the receiver serves that client alone, it maps the file instead.
"""

from __future__ import annotations

import mmap
import os
import stat
from typing import Any

import numpy as np

from atoll.errors import Code, FrameError, StatusError
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
            # The client has shortened it on the way, which is not the peer's fault: this one piece is lost.
            text = f"a file has {found.st_size} bytes instead of the {frame.nbytes} that were announced"
            raise StatusError(Code.DATA_LOSS, text)
        return self._contents(descriptor, frame.nbytes), nothing_to_release

    def _contents(self, descriptor: int, nbytes: int) -> Any:
        """The beginning of a file that has so many bytes; they may be written over. Raises StatusError (DATA_LOSS)."""
        content = aligned(nbytes)
        read_file(descriptor, content.data)
        return content


class MappedFileEngine(FileEngine):
    """The same for a receiver that serves one client alone: it maps files, which saves the copy and its fresh pages.

    A client that shortens its file before the bytes have been read ends the receiver by SIGBUS: never use this kind
    where that could hurt another client.
    """

    def _contents(self, descriptor: int, nbytes: int) -> Any:
        if not nbytes:
            return aligned(0)
        try:
            mapped = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)  # private: the file stays as it is
        except (OSError, ValueError) as error:
            raise StatusError(Code.DATA_LOSS, f"a file of {nbytes} bytes cannot be mapped: {error}") from None
        return np.frombuffer(mapped, np.uint8)
