"""The state of a resumable connection that survives the accepting process."""

from __future__ import annotations

import msgspec

from atoll.wire.resumption.retransmit_buffer import NONE, Counts


class LinkRecord(msgspec.Struct):
    """The acceptor's state of a connection, in plain fields that any format can store."""

    number: int
    role: str  # from the peer's certificate
    name: str
    received: Counts = NONE
    acknowledged: Counts = NONE  # by the peer
    whole: list[bytes] = []  # unacknowledged frames
    pieced: list[bytes] = []  # unacknowledged frames of messages in pieces
    # terms, each with the counts of sent messages when it began
    term_history: list[tuple[int, Counts]] = []
    patience: float = 0.0  # seconds that the peer waits after a loss of its socket; 0: as long as all others
