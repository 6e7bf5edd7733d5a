"""Messages from a controller to its standby: one snapshot, then a log batch for each turn of the controller.

    standby    -> controller   Hello; link message Acknowledge, which counts log batches
    controller -> standby      Refused, SnapshotChunk, LogBatchChunk, Heartbeat; link message Close at the cluster's end

Log batches arrive in order. Those between snapshot chunks also belong after the snapshot.
"""

from __future__ import annotations

from atoll.protocol.messages.opening_messages import Message, Refused

# The role in a standby's Hello.
STANDBY = "standby"


class SnapshotChunk(Message, frozen=True, tag=170):
    """A chunk of the snapshot from which the standby starts."""

    content: bytes
    term: int
    is_last: bool


class LogBatchChunk(Message, frozen=True, tag=171):
    """A chunk of a log batch: the journal records of one turn of the controller."""

    content: bytes
    is_last: bool


class Heartbeat(Message, frozen=True, tag=172):
    """A heartbeat, with the messages that peers have acknowledged: (connection, whole messages, messages in pieces).

    If the standby `is_relied_on`, the engine does not restart a controller that ends, so the standby must take over. A
    controller that `is_fenced` does not hold its lease, and sends nothing to its peers.
    """

    acknowledged: tuple[tuple[int, int, int], ...]
    is_relied_on: bool
    is_fenced: bool = False


ToStandby = Refused | SnapshotChunk | LogBatchChunk | Heartbeat
