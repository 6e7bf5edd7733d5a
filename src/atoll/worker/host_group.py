"""A host's place in its group: what it gets by way of the group's relay, and what it reports that way.

Invariant: a host does what the controller says in the order in which the controller said it, whichever way it came,
but for what came in pieces, which may be overtaken. There is one way at a time: directly until `JoinGroup`, by the
relay from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import FrameError
from atoll.protocol import messages as m
from atoll.wire.framing import MAX_FRAME, NO_MESSAGE, PieceBuffer
from atoll.worker.group_relay import GroupRelay, SendToHost

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(m.InGroup).decode


def decoded(content: Any) -> m.InGroup:
    """What a host of the group has sent. Raises FrameError for what is no message."""
    try:
        message: m.InGroup = _decode(content)
    except NO_MESSAGE as error:
        raise FrameError(f"a host of the group sent what is no message: {error}") from None
    return message


class HostGroup:
    """For any thread. `handle(message)` takes what is for this host, and tells whether more may come.

    `send` sends to another host of the group; `to_controller` sends messages to the controller.
    """

    def __init__(
        self,
        host: int,
        handle: Callable[[Any], bool],
        send: SendToHost,
        to_controller: Callable[..., None],
    ) -> None:
        self._host = host
        self._handle = handle
        self._send_to = send
        self._to_controller = to_controller
        self._relay_host: int | None = None
        self._lock = threading.Lock()  # of what has come before the group was joined; held while it is handled
        self._early: list[Any] | None = []
        self._has_joined = False  # and has handled what came before
        self._relay = GroupRelay(self._send, to_controller)
        self._pieces = PieceBuffer()  # from the relay, by its link's thread

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
        """Encoded, from a host of the group. Raises FrameError for what is no message, and for too large a one."""
        self.receive_message(decoded(content))

    def receive_message(self, message: m.InGroup) -> None:
        """The same, decoded. Raises FrameError for too large a message in pieces."""
        if type(message) is m.MemberDone:
            self._relay.ended(message.host, message.runs)
        elif type(message) is m.MemberFailed:
            self._relay.failed(message)
        elif type(message) is m.RelayedPiece:
            whole = self._pieces.add(message.content, message.is_last, MAX_FRAME)
            if whole is not None:
                self.receive(whole)
        elif self._has_joined:
            self._handle(message)
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
            self._has_joined = True

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

    def _send(self, host: int, content: bytes, in_pieces: bool = False) -> None:
        if host == self._host:
            self.receive(content)
        elif in_pieces:
            self._send_to(host, content, True)
        else:
            self._send_to(host, content)
