"""Messages from a controller to its standby: one snapshot, then everything that the controller handles.

    standby    -> controller   Hello, and about the connection: Acknowledge, of turns
    controller -> standby      Refused, SnapshotChunk, LogBatchChunk, Heartbeat; Close where the cluster has ended

Turns come in order, those before the last snapshot chunk included: all of them are after the snapshot.
"""

from __future__ import annotations

from atoll.protocol.messages.opening_messages import Message, Refused

# How a standby introduces itself.
STANDBY = "standby"


class SnapshotChunk(Message, frozen=True, tag=170):
    """A chunk of the snapshot with which the standby begins."""

    content: bytes
    term: int
    is_last: bool


class LogBatchChunk(Message, frozen=True, tag=171):
    """A chunk of a log batch: the journal records of one turn of the controller."""

    content: bytes
    is_last: bool


class Heartbeat(Message, frozen=True, tag=172):
    """A sign of life, with what peers have acknowledged: connection, whole messages, messages in pieces.

    Once it `is_relied_on` the controller is not started again where it ends: the standby is to take over.
    """

    acknowledged: tuple[tuple[int, int, int], ...]
    is_relied_on: bool


ToStandby = Refused | SnapshotChunk | LogBatchChunk | Heartbeat
