"""Which transfers of a session may land at a host: room is given, not refused.

A transfer waits, without a byte sent, while what its session has here is at the bound. Some never wait, since what has
arrived could wait for them: what a blocked plan awaits, and the feeds of the session's oldest launch. So a session has
the bound here, or the feeds of one launch where these are more.

Pure: its callers hold a lock, and call what it returns without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Transfer:
    nbytes: int
    launch: int
    grant: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Here:
    nbytes: int
    launch: int
    unasked: int  # bytes


class ReceiveWindow:
    """Of one session. `held` bytes are those that have landed, or may: its callers say so by feed."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: dict[int, _Transfer] = {}  # by feed, in the order in which they were announced
        self._landing: dict[int, _Transfer] = {}
        self._here: dict[int, _Here] = {}
        self.held = 0
        self.unasked = 0  # of these, what came without a request

    def request(self, feed: int, nbytes: int, launch: int, grant: Callable[[], None]) -> None:
        """A transfer was announced: it is granted by `admitted`."""
        self._waiting[feed] = _Transfer(nbytes, launch, grant)

    def admitted(
        self, is_awaited: Callable[[int], bool] = lambda feed: False, everything: bool = False
    ) -> list[Callable[[], None]]:
        """What may land from now on: the calls that tell so. For feeds that are awaited, a plan is blocked."""
        granted = []
        if not self._waiting:
            return []
        oldest = self._oldest()
        for feed, transfer in list(self._waiting.items()):
            fits = not self.held or self.held + transfer.nbytes <= self._bound
            if everything or fits or is_awaited(feed) or (transfer.launch and transfer.launch == oldest):
                del self._waiting[feed]
                self._landing[feed] = transfer
                self.held += transfer.nbytes
                granted.append(transfer.grant)
        return granted

    def _oldest(self) -> int:
        """The oldest launch of which something is here, is landing or waits; 0 where none is known."""
        launches = [each.launch for each in (*self._waiting.values(), *self._landing.values())]
        launches += [each.launch for each in self._here.values()]
        return min(filter(None, launches), default=0)

    def landed(self, feed: int, nbytes: int) -> None:
        """A feed has arrived, admitted or not."""
        transfer = self._landing.pop(feed, None)
        if transfer is None:
            self._here[feed] = _Here(nbytes, 0, nbytes)
        else:
            self._here[feed] = _Here(nbytes, transfer.launch, 0)
            self.held -= transfer.nbytes
        self.held += nbytes
        self.unasked += self._here[feed].unasked

    def taken(self, feed: int) -> None:
        """A feed is here no more."""
        here = self._here.pop(feed, None)
        if here is not None:
            self.held -= here.nbytes
            self.unasked -= here.unasked

    def withdraw(self, feed: int) -> None:
        """A transfer will not land."""
        self._waiting.pop(feed, None)
        transfer = self._landing.pop(feed, None)
        if transfer is not None:
            self.held -= transfer.nbytes

    def is_landing(self, feed: int) -> bool:
        """Whether the feed was asked for, and may come."""
        return feed in self._landing

    @property
    def waiting(self) -> int:
        """Transfers that wait for room."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._landing or self._here)
