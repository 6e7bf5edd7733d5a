"""The kinds of transfer. A channel sends a piece using the first kind that takes it.

To add a kind, write one file with its engine and its frames (see `transfers.transfer_engine`), and add a line here.
"""

from __future__ import annotations

from pkgutil import resolve_name

from atoll.transfers.file_engine import FileEngine, MappedFileEngine
from atoll.transfers.transfer_engine import TransferEngine

_NAMES = (
    "atoll.transfers.file_engine:FileEngine",
    "atoll.transfers.shared_chunks:SharedChunksEngine",
    "atoll.transfers.shared_memory_engine:SharedMemoryEngine",
    "atoll.transfers.streams:StreamEngine",
    "atoll.transfers.socket_engine:SocketEngine",
)
KINDS: tuple[type[TransferEngine], ...] = tuple(map(resolve_name, _NAMES))
# For a receiver that serves only one client: it maps files instead of reading them, and a client can harm only itself.
ONE_CLIENT_KINDS: tuple[type[TransferEngine], ...] = tuple(
    MappedFileEngine if kind is FileEngine else kind for kind in KINDS
)
