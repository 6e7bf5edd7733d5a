"""A host's place in its group: what it gets by way of the group's relay, and what it reports that way.

Invariant: a host does what the controller says in the order in which the controller said it, whichever way it came.
There is one way at a time: directly until `JoinGroup`, by the relay from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import FrameError
from atoll.protocol import messages as m
from atoll.worker.relay import Relay

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(m.InGroup).decode


class HostGroup:
    """For any thread. `handle(message)` takes what is for this host, and tells whether more may come.

    `send(host, content)` sends to another host of the group, in order and without waiting for it; `to_controller` sends
    messages to the controller.
    """

    def __init__(
        self,
        host: int,
        handle: Callable[[Any], bool],
        send: Callable[[int, bytes], None],
        to_controller: Callable[..., None],
    ) -> None:
        self._host = host
        self._handle = handle
        self._send_to = send
        self._to_controller = to_controller
        self._relay_host: int | None = None
        self._lock = threading.Lock()  # of what has come before the group was joined; held while it is handled
        self._early: list[Any] | None = []
        self._relay = Relay(self._send, to_controller)

    # ---- what comes

    def take(self, message: Any) -> bool:
        """A message on the connection to the controller; False where it was the last."""
        if type(message) is m.Forward:
            self._relay.forward(message)
            return True
        if type(message) is m.JoinGroup:
            self._join(message)
            return True
        if type(message) is m.Ping and self._relay_host == self._host:
            self._relay.tick()
        return self._handle(message)

    def receive(self, content: Any) -> None:
        """Encoded, from a host of the group. Raises FrameError for what is no message."""
        try:
            message = _decode(content)
        except msgspec.MsgspecError as error:
            raise FrameError(f"a host of the group sent what is no message: {error}") from None
        if type(message) is m.MemberDone:
            self._relay.ended(message.host, message.runs)
        elif type(message) is m.MemberFailed:
            self._relay.failed(message)
        else:
            with self._lock:
                if self._early is not None:
                    self._early.append(message)
                else:
                    self._handle(message)

    def _join(self, message: m.JoinGroup) -> None:
        with self._lock:
            self._relay_host = message.relay
            early, self._early = self._early or [], None
            for each in early:
                self._handle(each)

    # ---- what is sent

    def report(self, *messages: Any) -> None:
        """Sends messages to the controller, those about the ends of dispatch units by the relay where there is one."""
        relay = self._relay_host
        if relay is None:
            self._to_controller(*messages)
            return
        for message in messages:
            if type(message) is m.Done:
                if relay == self._host:
                    self._relay.ended(relay, message.runs)
                else:
                    self._send_to(relay, _encode(m.MemberDone(self._host, message.runs)))
            elif type(message) is m.Failed:
                failure = m.MemberFailed(self._host, message.sequence, message.status)
                if relay == self._host:
                    self._relay.failed(failure)
                else:
                    self._send_to(relay, _encode(failure))
            else:
                self._to_controller(message)

    def _send(self, host: int, content: bytes) -> None:
        if host == self._host:
            self.receive(content)
        else:
            self._send_to(host, content)
