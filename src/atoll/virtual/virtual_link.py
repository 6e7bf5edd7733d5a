"""A session's ways to a simulated cluster: its control connection and its data channels, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.session.session_interfaces import CallbackHandler, Unreached
from atoll.transfers.inbox import Inbox


class VirtualConnection:
    """`send(message)` has a message reach the controller; contents are in the hosts' `inboxes` at once.

    Both seams of `session.session_interfaces`, for the session of this number.
    """

    def __init__(
        self,
        session: int,
        send: Callable[[Any], None],
        inboxes: Mapping[int, Inbox],
        on_close: Callable[[], None],
    ) -> None:
        self.send = send
        self.calls: CallbackHandler | None = None
        self.awaits: Callable[[], bool] = lambda: False
        self._session = session
        self._inboxes = inboxes
        self._on_close: Callable[[], None] | None = on_close

    def connect(
        self, hosts: Sequence[tuple[int, str]], then: Callable[[Unreached], None], patience: float = 0.0
    ) -> None:
        """All hosts are reached at once."""
        then({})

    def disconnect(self, hosts: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Inboxes outlive losses."""
        return ()

    def forget_uploads(self) -> None:
        """Nothing is kept."""

    def upload(self, hosts: Sequence[int], feed: int, contents: Sequence[Any], launch: int = 0) -> None:
        for host in hosts:
            self._inboxes[host].put(self._session, feed, b"".join(contents))

    def upload_file(self, hosts: Sequence[int], feed: int, nbytes: int, descriptor: int, launch: int = 0) -> None:
        contents = os.pread(descriptor, nbytes, 0)
        os.close(descriptor)
        self.upload(hosts, feed, [contents])

    def answer(self, feed: int, contents: Sequence[Any]) -> None:
        """Null programs call nobody."""

    def close(self) -> None:
        """Once, whichever of the two closes first."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
