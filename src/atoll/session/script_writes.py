"""The contents that a client's process sends to hosts itself, from the launch that needs them until a host has them.

Pure: `ask`, `forget`, `sent` and `upload` are the effects. Use it on the session's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import msgspec

_NO_HOST = -1  # to which no client has a connection


class _Write(msgspec.Struct):
    feed: int
    hosts: tuple[int, ...]
    nbytes: int
    is_lost: bool = False  # whether a host has failed since the client was asked

    @property
    def asked(self) -> int:
        """The host to which the client sends the contents: several hosts get them from the proxy."""
        return self.hosts[0] if len(self.hosts) == 1 else _NO_HOST


class ScriptWrites:
    """The writes of one session whose contents no host has received.

    The client keeps contents until `forget`, so they can be asked for again if a host fails. Invariant: each feed is
    reported as `sent`, or passed to `upload`, once.

    Args:
        ask: Asks the client to send the contents of a write as a feed to a host.
        forget: Tells the client that the contents of a write are not needed any more.
        sent: Called when a host has received a feed from the client.
        upload: Sends the contents of a feed that the client has sent here to hosts.
    """

    def __init__(
        self,
        ask: Callable[[int, int, int], None],
        forget: Callable[[int], None],
        sent: Callable[[int], None],
        upload: Callable[[tuple[int, ...], int, Sequence[Any]], None],
    ) -> None:
        self._ask, self._forget, self._sent, self._upload = ask, forget, sent, upload
        self._writes: dict[int, _Write] = {}

    def __len__(self) -> int:
        return len(self._writes)

    def start(self, write: int, feed: int, hosts: Sequence[int], nbytes: int) -> None:
        """Ask for the contents of a write, which hosts await as `feed`."""
        started = self._writes[write] = _Write(feed, tuple(hosts), nbytes)
        self._ask(write, feed, started.asked)

    def nbytes(self, write: int) -> int:
        """Return the size of a write whose contents are awaited, or -1 for others."""
        found = self._writes.get(write)
        return -1 if found is None else found.nbytes

    def landed(self, write: int) -> None:
        """Note that a host has received the contents. If it has failed since they were asked for, ask again."""
        found = self._writes.get(write)
        if found is None:
            return
        if found.is_lost:
            found.is_lost = False
            self._ask(write, found.feed, found.asked)
            return
        del self._writes[write]
        self._sent(found.feed)
        self._forget(write)

    def arrived(self, write: int, contents: Sequence[Any]) -> None:
        """Note that the client has sent the contents here, because it has no connection to the host."""
        found = self._writes.pop(write, None)
        if found is not None:
            self._upload(found.hosts, found.feed, contents)
            self._forget(write)

    def hosts_failed(self, hosts: Set[int]) -> None:
        """Note that hosts have lost what they had received."""
        for each in self._writes.values():
            each.is_lost = each.is_lost or not hosts.isdisjoint(each.hosts)

    def ask_again(self) -> None:
        """Ask for all contents, because the client has a new connection."""
        for write, each in self._writes.items():
            self._ask(write, each.feed, each.asked)
