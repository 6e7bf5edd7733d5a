"""What a controller says to the standby that follows it: a snapshot once, and all that it handles after that.

    standby    -> controller   Hello, and about the connection: Acknowledge, of turns
    controller -> standby      Refused, BasisPart, TurnPart, Pulse; Close where the cluster has ended

Turns come in order, those that come before the last part of the basis included: all of them are after the snapshot.
"""

from __future__ import annotations

from atoll.protocol.messages.opening import Message, Refused

# How a standby introduces itself.
STANDBY = "standby"


class BasisPart(Message, frozen=True, tag=170):
    """Some of the snapshot, as a journal has it."""

    content: bytes
    term: int
    is_last: bool


class TurnPart(Message, frozen=True, tag=171):
    """Some of the records of a turn, as a journal has them."""

    content: bytes
    is_last: bool


class Pulse(Message, frozen=True, tag=172):
    """The controller lives. Peers have acknowledged so many messages: connection, whole ones, those in pieces.

    Once it `is_relied_on` the controller is not started again where it ends: the standby is to take over.
    """

    acknowledged: tuple[tuple[int, int, int], ...]
    is_relied_on: bool


ToStandby = Refused | BasisPart | TurnPart | Pulse
