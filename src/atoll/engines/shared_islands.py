"""The options of a process for several islands, and its messages with the engine: lines of JSON on a socket."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from atoll.decodable import decodable
from atoll.worker.worker_options import IslandOptions


class SharedOptions(msgspec.Struct, frozen=True):
    """The options of a process for several islands, which the engine starts and ends one by one."""

    parent: int  # pid; the process ends with this process
    descriptor: int  # of the socket to the engine; the process ends when the engine closes it


class StartIsland(msgspec.Struct, frozen=True, tag="start"):
    """Start the hosts of an island."""

    options: IslandOptions


class EndIsland(msgspec.Struct, frozen=True, tag="end"):
    """End the hosts of an island."""

    island: int


class IslandEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The hosts of an island have ended. The engine may start the island again."""

    island: int
    status: int  # as the exit status of a process for this island only


AnyMessage = StartIsland | EndIsland | IslandEnded

_decoder: msgspec.json.Decoder[AnyMessage] = msgspec.json.Decoder(decodable(AnyMessage))


class Lines:
    """Splits the bytes that arrive on a socket into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def messages(self, data: bytes) -> Iterator[AnyMessage]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return map(_decoder.decode, lines)


def line(message: AnyMessage) -> bytes:
    """Return a message in the form that `Lines` reads."""
    return msgspec.json.encode(message) + b"\n"
