"""Decide by the first message of an incoming connection what the process of a controller does with the connection.

The controller decides whether it admits a peer. Before that, `verdict_on` decides whether the controller is asked,
without I/O. `IncomingConnection` carries out the decision.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.controller.core import Controller
from atoll.controller_process.entry import clean
from atoll.controller_process.frame_limits import limits_of_client
from atoll.controller_process.standby_replication import StandbyReplication, is_standby, put_off
from atoll.protocol import messages as m
from atoll.wire.connection import Connection
from atoll.wire.framing import FrameLimits
from atoll.wire.resumption.link_messages import AnyLinkMessage, Resume
from atoll.wire.resumption.resumable_connections import AcceptedConnection, ResumableConnections
from atoll.wire.unauthenticated import UnauthenticatedConnections


class Verdict(enum.Enum):
    """The use of a connection whose first message has arrived."""

    ASK = enum.auto()  # the controller admits or refuses the peer
    REPLICATE = enum.auto()  # the peer is a standby of this controller
    PUT_OFF = enum.auto()  # another controller may have taken over, so the peer tries again


def verdict_on(message: Any, *, suspicion: str, resumes: bool) -> Verdict:
    """Return the use of a connection with this first message.

    `suspicion` is the reason why another controller may have taken over, or "". Even with a suspicion, the controller
    admits commands, because they may ask for its state. A command's changes are put off. If `resumes` is false, this
    process replicates to no standby, and the controller refuses standbys.
    """
    if suspicion and not is_operator(message):
        return Verdict.PUT_OFF
    return Verdict.REPLICATE if resumes and is_standby(message) else Verdict.ASK


def is_operator(message: Any) -> bool:
    """Return whether a connection's first message is from a command."""
    return isinstance(message, m.Hello) and message.role == "operator"


class PeerServices(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The parts of a controller's process that take over connections after their first messages."""

    controller: Controller
    connections: dict[int, Connection | AcceptedConnection]  # of the process, by number
    replication: StandbyReplication
    resumable: ResumableConnections
    unauthenticated: UnauthenticatedConnections
    has_lease: bool  # this process sends messages only while it holds an external lease
    resumes: bool  # this process or a standby can resume connections

    def suspicion(self) -> str:
        """Return the reason why another controller may hold the lease, or ""."""
        return self.replication.takeover_suspicion() if self.has_lease else ""

    def limits_of(self, number: int) -> FrameLimits | None:
        """Return the frame limits of a client, or None for other peers."""
        peer = self.controller.connections.peers.get(number)
        if peer is None or peer.tenant is None:
            return None
        return limits_of_client(self.controller.resources.device_count)


class IncomingConnection:
    """An accepted connection until its first message.

    Args:
      number: identifies the connection to the controller.
      on_made: is called with the connection after its TLS handshake, if any.
      on_message: receives the messages that are for the controller.
      on_lost: is called when the connection is lost, or is not the controller's any longer.
    """

    def __init__(
        self,
        services: PeerServices,
        number: int,
        *,
        on_made: Callable[[Connection], None],
        on_message: Callable[[Any], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._services = services
        self._number = number
        self._on_message = on_message
        self._on_lost = on_lost
        self.connection = Connection(
            m.ToController,
            self._first_message,
            on_lost,
            name="a client of the controller",
            on_made=on_made,
            on_link=self._link_message,
            unauthenticated=services.unauthenticated,
        )

    def _first_message(self, message: Any) -> None:
        services = self._services
        on_message = self._operator_message if is_operator(message) else self._on_message
        self.connection.set_handlers(on_message, self._on_lost, self._link_message)
        suspicion = services.suspicion()
        verdict = verdict_on(message, suspicion=suspicion, resumes=services.resumes)
        if verdict is Verdict.PUT_OFF:
            self._put_off(message, suspicion)
        elif verdict is Verdict.REPLICATE:
            self._on_lost("it is a standby of this controller")
            services.replication.serve(self.connection, clean(message))
        else:
            self._on_message(message)
            if services.controller.connections.is_admitted(self._number):
                self._admitted(message)

    def _operator_message(self, message: Any) -> None:
        """Handle a message of a command. Put off changes without the lease, because they could be lost."""
        suspicion = self._services.suspicion() if isinstance(message, m.Operation) else ""
        if suspicion:
            self._put_off(message, suspicion)
        else:
            self._on_message(message)

    def _put_off(self, message: Any, suspicion: str) -> None:
        self._on_lost("this controller does not hold its lease")
        put_off(self.connection, message, suspicion)

    def _admitted(self, hello: m.Hello) -> None:
        """Let the peer send large messages. If it can resume its connection, it gets a connection for that."""
        services, connection = self._services, self.connection
        connection.limit_frames(services.limits_of(self._number))
        connection.authenticated()
        if services.resumes and hello.resumes:
            granted = services.resumable.grant(self._number, connection, self._on_message, self._on_lost)
            services.connections[self._number] = granted
        elif services.resumes:
            services.resumable.introduce(connection)

    def _link_message(self, message: AnyLinkMessage) -> None:
        if isinstance(message, Resume):
            self._on_lost(f"it resumes connection {message.number}")
            self.connection.ignore()
            self.connection.limit_frames(self._services.limits_of(message.number))
            self._services.resumable.resume(self.connection, message)
