"""The seams between a session and the cluster: its control connection, its data channels, its futures.

Over sockets they are `wire.connection.Connection`, `channels.Channels` and `asyncio.Future`. Virtual time and unit
tests have their own. A session calls all methods on one thread; none of them may block or raise.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from atoll.errors import ConnectError, Status

# The feed, a part of its contents, whether more will follow, and what to call when the part has been read.
OnFeed = Callable[[int, Any, bool, Callable[[], None]], None]
# Data channels no longer work although the controller reports no loss: the session is over.
OnBroken = Callable[[Status], None]
# The hosts that could not be reached, each with the reason.
Unreached = Mapping[int, ConnectError]


class ControlConnection(Protocol):
    """Carries messages to the controller, in order."""

    def send(self, message: Any) -> None: ...

    def close(self) -> None: ...


class CallbackHandler(Protocol):
    """Takes hosts' calls into the client's Python. For any thread."""

    def call(self, feed: int, content: Any, done: Callable[[], None]) -> None:
        """Handle a call or a notice (see `host_services.calls.call_messages`); call `done` once it has been read."""

    def pass_socket(self, sock: socket.socket) -> None:
        """Passes a host's socket on to the client, where that is on this machine. The caller closes its own."""

    def host_lost(self, host: int) -> None:
        """There is no channel to the host any more: it waits for no answer."""


class DataChannels(Protocol):
    """Carries contents to and from hosts. What is uploaded to a host without a channel waits for one.

    `calls` takes the hosts' calls into the client's Python; without it nobody answers them.
    """

    calls: CallbackHandler | None
    awaits: Callable[[], bool]  # whether contents are awaited of any host; on any thread

    def connect(
        self, hosts: Sequence[tuple[int, str]], then: Callable[[Unreached], None], patience: float = 0.0
    ) -> None:
        """Opens a channel to each (host, data address), and calls `then` once all were tried, for `patience` seconds.

        A host that failed meanwhile, by `disconnect`, does not count as unreached.
        """

    def disconnect(self, hosts: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Close the channels to failed hosts. Return the (host, feed) of launches that are sent after a restart.

        Some of them were sent before, and the host may not have used them.
        """

    def forget_uploads(self) -> None:
        """No launch of the session is in flight: what was sent before has been used."""

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        """Sends buffers, one after the other, as one feed. They must not change any more."""

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        """Sends the first `nbytes` of a file as one feed, and closes the descriptor."""

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        """Sends the answer to a call. On any thread; waits while the host does not read. Dropped if it is gone."""

    def close(self) -> None: ...


class ReplyFuture(Awaitable[Any], Protocol):
    """Of `asyncio.Future`, what sessions and their clients use."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...
