"""A controller with simulated peers and a simulated clock, for tests of fences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from atoll.controller_process.takeover import LEASE_SECONDS

HOSTS = (1, 2, 3)
ENGINE, PROXY = 8, 9
LATER = LEASE_SECONDS + 0.1


class Peer:
    """Connection of the controller."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.bytes_in = 0
        self.is_corked = False

    def statistics(self) -> Any:
        return self

    def fence(self) -> None:
        self.is_corked = True

    def unfence(self) -> None:
        self.is_corked = False


class _Fence(Protocol):
    def _fence_or_unfence(self, now: float) -> None: ...


class FencedPeers:
    """The peers of a controller, as the table of connections that a fence reads. Tests set the `fence`."""

    fence: _Fence

    def __init__(self) -> None:
        self.peers = {number: Peer(number) for number in (*HOSTS, ENGINE, PROXY)}
        self.now = 100.0

    def all(self) -> list[Peer]:
        return list(self.peers.values())

    def look(self, *heard: int, after: float = 0.0) -> None:
        """Advance the clock by `after` seconds, receive bytes from these peers, and let the fence check."""
        self.now += after
        for number in heard:
            self.peers[number].bytes_in += 1
        self.fence._fence_or_unfence(self.now)

    @property
    def fenced(self) -> list[int]:
        return [number for number, peer in self.peers.items() if peer.is_corked]


S = TypeVar("S", bound=FencedPeers)


def player(make: Callable[[], S]) -> Callable[[Callable[[S], None]], None]:
    """Return a function that runs a scene with new peers in an event loop."""

    def play(scene: Callable[[S], None]) -> None:
        async def main() -> None:
            scene(make())

        asyncio.run(main())

    return play
