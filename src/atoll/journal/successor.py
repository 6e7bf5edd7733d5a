"""The record, in a journal's directory, of the controller that may continue, or has continued, from a copy of it.

A controller writes the record before a standby may take over. If the controller is started again from the journal, the
record tells it whom to ask, or that its journal is outdated.
"""

from __future__ import annotations

import msgspec

from atoll.decodable import decodable

NAME = "successor"


class Successor(msgspec.Struct, frozen=True):
    """A controller at `address`: a standby that may take over, or the one that has taken over in `term`.

    `address` is "" if only the term is known, and `term` is 0 for a standby.
    """

    address: str = ""
    term: int = 0

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        return f"the controller of term {self.term}{where}" if self.term else f"the standby{where}"


_decode = msgspec.json.Decoder(decodable(Successor)).decode
encode_successor = msgspec.json.Encoder().encode


def decode_successor(content: bytes) -> Successor:
    """Return the content of the file NAME. Return an empty record if it cannot be read: it is only a hint."""
    try:
        return _decode(content)
    except msgspec.DecodeError:
        return Successor()
