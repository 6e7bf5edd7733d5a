"""The interfaces between a session and the cluster: its control connection, its data channels and its futures.

Over sockets they are `wire.connection.Connection`, `channels.Channels` and `asyncio.Future`. Virtual time and unit
tests have their own implementations. A session calls all methods on one thread. The methods must not block or raise.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from atoll.errors import ConnectError, Status
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.wire.tls.identity import Certificate

# The feed, a part of its contents, whether more will follow, and a function to call when the part has been read.
OnFeed = Callable[[int, Any, bool, Callable[[], None]], None]
# Called if data channels break and the controller does not report the loss of a host: the session is over.
OnBroken = Callable[[Status], None]
# The hosts that could not be reached, each with the reason.
Unreached = Mapping[int, ConnectError]


class HostAccess(NamedTuple):
    """How the client's process can open its own channel to a host on another machine: see `call_messages.Dial`."""

    address: str
    session: int
    secret: str
    lease: float
    certificate: Certificate | None


class ControlConnection(Protocol):
    """Carries messages to the controller, in order."""

    def send(self, message: Any) -> None: ...

    def close(self) -> None: ...

    @property
    def is_closed(self) -> bool:
        """Whether it has ended. After `close`, the controller first has to know it."""


class CallbackHandler(Protocol):
    """Takes what hosts send to the client's process: calls into its Python, and contents of arrays. Thread-safe."""

    def call(self, feed: int, content: Any, done: Callable[[], None]) -> None:
        """Handle a call or a notice (see `host_services.calls.call_messages`); call `done` once it has been read."""

    def forward(self, feed: int, content: Any, more: bool, done: Callable[[], None]) -> None:
        """Forward a piece of SCRIPT_FEEDS to the client, and call `done` once it has been read."""

    def pass_socket(self, sock: socket.socket, host: int) -> None:
        """Pass a host's socket on to the client, if that is on this machine. The caller closes its own descriptor."""

    def host_opened(self, host: int, is_local: bool) -> None:
        """Note that there is a channel to the host."""

    def host_lost(self, host: int, was_local: bool) -> None:
        """Drop the calls of a host, which no longer has a channel. `was_local`: the host is on this machine."""


class DataChannels(Protocol):
    """Carries contents to and from hosts. Uploads to a host without a channel wait until it has one."""

    def set_callback_handler(self, handler: CallbackHandler) -> None:
        """Pass what hosts send to the client's process to `handler`. Without a handler, each call gets an error."""

    def connect(
        self, hosts: Sequence[tuple[int, str]], then: Callable[[Unreached], None], patience: float = 0.0
    ) -> None:
        """Open a channel to each (host, data address), trying for `patience` seconds. Call `then` after all attempts.

        A host that `disconnect` removes meanwhile does not count as unreached.
        """

    def disconnect(self, hosts: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Close the channels to failed hosts. Return the (host, feed) of launches to send after the hosts restart.

        They include feeds that were already sent, since the hosts may not have used them.
        """

    def forget_uploads(self) -> None:
        """Forget sent uploads: no launch of the session is in flight, so the hosts have used them."""

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        """Send buffers one after the other as one feed. The buffers must not change afterwards."""

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        """Send the first `nbytes` of a file as one feed, and close the descriptor."""

    def is_local(self, host: int) -> bool:
        """Return whether there is a channel to the host on this machine, so that it can also reach local clients."""

    def access(self, host: int) -> HostAccess | None:
        """Return how the client's process can reach a host, or None if it is on this machine or has no channel."""

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        """Send the answer to a call, or drop it if the host is lost. Thread-safe; may wait for the host to read."""

    def read_directly(self, host: int, wanted: ReadWanted) -> bool:
        """Request the contents of an array from a host on this machine.

        Return False if that would wait, or if the host does not take such requests.
        """

    def close(self) -> None: ...


# Opens the channels of a session. The last argument returns whether contents are awaited of any host, on any thread.
OpenChannels = Callable[[OnFeed, OnBroken, Callable[[], bool]], DataChannels]


class ReplyFuture(Awaitable[Any], Protocol):
    """The part of `asyncio.Future` that sessions and their clients use."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...
