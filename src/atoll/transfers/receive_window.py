"""Which transfers of one session may land at a host: those that fit into its bound, and those that must not wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice

import msgspec

from atoll.errors import Code, Status
from atoll.transfers.failed_feeds import feeds_within

# Waiting transfers of a session, the first ones, that are examined whenever memory becomes free. A client may announce
# far more, and all sessions share the lock.
MAX_EXAMINED = 256
_MIN_STALE = 64


class Transfer(msgspec.Struct, frozen=True):
    """A transfer that was announced. One of `grant` and `refuse` is called once it is decided whether it may land."""

    nbytes: int
    launch: int  # is the same for feeds that are needed together, or 0
    grant: Callable[[], None]
    also: Sequence[int] = ()  # the feeds that it carries, if there are several
    piece: object = None  # identifies the transfer
    refuse: Callable[[Status], None] | None = None  # None if it is never refused


class _Here(msgspec.Struct, frozen=True):
    nbytes: int
    launch: int
    unasked: int  # bytes


class ReceiveWindow:
    """Decides which transfers of one session may land. Pure: callers hold a lock, and call the grants without it.

    The work after a change does not depend on the number of waiting transfers, which only their client bounds.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: dict[int, Transfer] = {}  # by feed, in the order of the requests
        self._carriers: dict[int, int] = {}  # the first feeds of waiting transfers, by each feed that they carry
        self._of_launch: dict[int, dict[int, None]] = {}  # the first feeds of waiting transfers, by launch
        self._landing: dict[int, Transfer] = {}
        self._here: dict[int, _Here] = {}
        self._known: Counter[int] = Counter()  # by launch: the transfers and feeds above
        self._launches: list[int] = []  # a heap of these launches, and of some that have no feeds any more
        self.held = 0  # bytes that have landed or may land
        self.landing = 0  # those of them that have not landed
        self.unasked = 0  # held bytes that arrived without a request

    def request(self, feed: int, transfer: Transfer) -> None:
        """Add a transfer whose first feed is `feed`. `admitted` returns its grant once it may land."""
        self._forget(self._stop_waiting(feed))
        self._waiting[feed] = transfer
        self._carriers.update(dict.fromkeys((feed, *transfer.also), feed))
        if launch := transfer.launch:
            self._of_launch.setdefault(launch, {})[feed] = None
            if not self._known[launch]:
                heappush(self._launches, launch)
            self._known[launch] += 1

    def admitted(
        self,
        changed: Iterable[int] = (),
        is_awaited: Callable[[int], bool] = lambda feed: False,
        everything: bool = False,
        lacks_memory: Callable[[int], bool] = lambda nbytes: False,
    ) -> list[Callable[[], None]]:
        """Return the grants of transfers that may land from now on. A blocked plan waits for feeds that are awaited.

        `changed` are feeds that were requested, or are awaited, since the last call. A transfer that may land although
        it exceeds the bound is refused if `lacks_memory(nbytes)`, also if nothing else is held.
        """
        if not self._waiting:
            return []
        if everything:
            return [self._land(feed) for feed in list(self._waiting)]
        granted = []
        for feed in changed:
            first = self._carriers.get(feed)
            if first is not None and (self._fits(first) or any(map(is_awaited, (first, *self._waiting[first].also)))):
                granted.append(self._land_or_refuse(first, lacks_memory))
        granted += [self._land_or_refuse(feed, lacks_memory) for feed in list(self._of_launch.get(self._oldest(), ()))]
        if self.held <= self._bound:
            for feed in list(islice(self._waiting, MAX_EXAMINED)):
                if self._fits(feed):
                    granted.append(self._land_or_refuse(feed, lacks_memory))
        return granted

    def _fits(self, feed: int) -> bool:
        """Return whether a waiting transfer need not wait for others: it is within the bound, or nothing is held."""
        return not self.held or self._is_within_bound(feed)

    def _is_within_bound(self, feed: int) -> bool:
        return self.held + self._waiting[feed].nbytes <= self._bound

    def _land_or_refuse(self, feed: int, lacks_memory: Callable[[int], bool]) -> Callable[[], None]:
        """Let a waiting transfer land, and return its grant, or its refusal if there is no memory beyond the bound."""
        transfer = self._waiting[feed]
        refuse, nbytes = transfer.refuse, transfer.nbytes
        if refuse is None or self._is_within_bound(feed) or not lacks_memory(nbytes):
            return self._land(feed)
        self._forget(self._stop_waiting(feed))
        beside = f", beyond {self.held} bytes of the same session" if self.held else ""
        text = f"this host has too little memory left for {nbytes} bytes{beside}"
        return partial(refuse, Status(Code.RESOURCE_EXHAUSTED, text))

    def _land(self, feed: int) -> Callable[[], None]:
        """Let a waiting transfer land, and return its grant."""
        transfer = self._stop_waiting(feed)
        assert transfer is not None
        self._forget(self._stop_landing(feed))  # a peer may announce a feed twice
        self._landing[feed] = transfer
        self.held += transfer.nbytes
        self.landing += transfer.nbytes
        return transfer.grant

    def _stop_waiting(self, feed: int) -> Transfer | None:
        transfer = self._waiting.pop(feed, None)
        if transfer is None:
            return None
        for each in (feed, *transfer.also):
            if self._carriers.get(each) == feed:
                del self._carriers[each]
        if transfer.launch:
            others = self._of_launch[transfer.launch]
            del others[feed]
            if not others:
                del self._of_launch[transfer.launch]
        return transfer

    def _forget(self, each: Transfer | _Here | None) -> None:
        """Note that a transfer or a feed of a launch is not known any more."""
        if each is None or not each.launch:
            return
        self._known[each.launch] -= 1
        if not self._known[each.launch]:
            del self._known[each.launch]
            if len(self._launches) > 2 * len(self._known) + _MIN_STALE:
                self._launches = list(self._known)
                heapify(self._launches)

    def _oldest(self) -> int:
        """Return the oldest launch that has a feed here, landing or waiting, or 0 if none is known."""
        while self._launches and self._launches[0] not in self._known:
            heappop(self._launches)
        return self._launches[0] if self._launches else 0

    def waiting_in(self, feeds: range) -> list[int]:
        """Return the feeds in a range that waiting transfers carry."""
        return feeds_within(feeds, self._carriers)

    def landed(self, feed: int, nbytes: int, was_asked: bool = False) -> None:
        """Count a feed that has arrived, admitted or not. With `was_asked`, it is a part of an admitted transfer."""
        transfer = self._stop_landing(feed)
        if transfer is None:
            self._here[feed] = _Here(nbytes, 0, 0 if was_asked else nbytes)
        else:
            self._here[feed] = _Here(nbytes, transfer.launch, 0)
        self.held += nbytes
        self.unasked += self._here[feed].unasked

    def taken(self, feed: int) -> None:
        """Forget a feed that was taken or dropped."""
        here = self._here.pop(feed, None)
        if here is not None:
            self.held -= here.nbytes
            self.unasked -= here.unasked
            self._forget(here)

    def withdraw_piece(self, feed: int, piece: object) -> None:
        """Forget the transfer of this `piece`, but not one that has replaced it."""
        for transfers in (self._waiting, self._landing):
            found = transfers.get(feed)
            if found is not None and found.piece is piece:
                self.withdraw(feed)

    def withdraw(self, feed: int) -> None:
        """Forget a transfer that will not land."""
        self._forget(self._stop_waiting(feed))
        self._forget(self._stop_landing(feed))

    def _stop_landing(self, feed: int) -> Transfer | None:
        """Remove and return a transfer that was admitted, if there is one."""
        transfer = self._landing.pop(feed, None)
        if transfer is not None:
            self.held -= transfer.nbytes
            self.landing -= transfer.nbytes
        return transfer

    def is_landing(self, feed: int) -> bool:
        """Return whether the feed was admitted and has not arrived."""
        return feed in self._landing

    @property
    def waiting(self) -> int:
        """The number of transfers that do not fit yet."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._landing or self._here)
