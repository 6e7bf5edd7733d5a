"""The kinds of transfer, in the order in which a channel asks them whether they take a piece."""

from __future__ import annotations

from atoll.transfers.engine import TransferEngine
from atoll.transfers.files import FileEngine
from atoll.transfers.shared_memory import SharedMemoryEngine
from atoll.transfers.sockets import SocketEngine

KINDS: tuple[type[TransferEngine], ...] = (
    FileEngine,
    SharedMemoryEngine,
    SocketEngine,
)
