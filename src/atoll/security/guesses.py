"""Limits how often one address may try tokens. Pure: the callers bring the time.

Only wrong tokens count. After `BURST` of them the address may try one per second; until then its tokens are not looked
at, whether they are right or not, so that a guess tells nothing.
"""

from __future__ import annotations

from atoll.wire.pending_connections import address_key

BURST = 20
PER_SECOND = 1.0
TOO_MANY = "too many wrong tokens came from this address: try again in a minute, with the right one"
MAX_ADDRESSES = 4096


class Guesses:
    """The wrong tokens of each address. Peers whose address is not known, and those of unix sockets, are not limited.

    A unix socket is open to one user, who can read the tokens.
    """

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}  # by address: how many count now, and when that was so

    def may_try(self, address: str, now: float) -> bool:
        """Return whether a token of this address is looked at now."""
        return self._count(address, now) < BURST

    def wrong(self, address: str, now: float) -> None:
        """Note that a token was wrong."""
        if not _is_limited(address):
            return
        key = address_key(address)
        count = self._count(address, now)
        self._spent.pop(key, None)
        while len(self._spent) >= MAX_ADDRESSES:
            del self._spent[next(iter(self._spent))]
        self._spent[key] = count + 1, now

    def _count(self, address: str, now: float) -> float:
        count, since = self._spent.get(address_key(address), (0.0, now))
        return max(0.0, count - (now - since) * PER_SECOND)


def _is_limited(address: str) -> bool:
    return bool(address) and not address.startswith("user ")
