"""Tells the peers of a controller that cannot be restarted why the cluster has ended.

They would otherwise try to reconnect for the grace time, and then report only that nobody listens.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.security.enrollment import AskAuthority, AuthorityIs, FromJoiner, NotEnrolled
from atoll.security.roles import Role
from atoll.security.start_security import load_certificate_authority
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import listen
from atoll.wire.resumption.link_messages import AnyLinkMessage, Resume, ResumeRefused
from atoll.wire.tls.identity import Identity
from atoll.wire.unauthenticated import UnauthenticatedConnections

NOTICE_SECONDS = 5.0  # more than the pauses of peers between two attempts
# The answer to processes that join, which may have no right token: it does not contain the reason.
JOIN_AFTER_END = "the cluster has ended: `atoll status` on its machine gives the reason"


async def serve_end_notice(
    address: Address, directory: str, reason: str, spares: float = 0.0, seconds: float = NOTICE_SECONDS
) -> None:
    """Answer everybody who dials the controller's `address` for some seconds with the reason for the end.

    Peers that may be away for at least `spares` seconds, unless that is 0, wait for the next cluster nevertheless.
    `directory` has the cluster's certificate authority, for an address with TLS. Raises OSError or AtollError if the
    address cannot be used.
    """
    text = f"the cluster has ended: {reason}"
    unauthenticated = UnauthenticatedConnections()
    identity = None
    authority_pem = b""
    if address.tls:
        authority = load_certificate_authority(directory)
        identity = Identity(authority.certificate_for(Role.CONTROLLER, "the controller"))
        authority_pem = authority.pem

    def on_made(connection: Connection) -> None:
        if identity is None or connection.peer_role:
            return

        def answer(message: FromJoiner) -> None:
            is_first = isinstance(message, AskAuthority)  # the joiner verifies this process before it sends its token
            connection.send(AuthorityIs(authority_pem, time.time()) if is_first else NotEnrolled(JOIN_AFTER_END))
            connection.close()

        connection.expect(FromJoiner, answer, lambda reason: None)

    def accept() -> Connection:
        def on_message(message: Any) -> None:
            connection.send(m.Refused(Status(Code.UNAVAILABLE, text)))
            connection.close()

        def on_link(message: AnyLinkMessage) -> None:
            if isinstance(message, Resume):
                connection.send_link(ResumeRefused(text, final=True, spares=spares))
            connection.close()

        connection = Connection(
            m.ToController,
            on_message,
            lambda reason: None,
            name="a peer of a cluster that has ended",
            on_link=on_link,
            on_made=on_made,
            unauthenticated=unauthenticated,
        )
        return connection

    server, _ = await listen(address, accept, identity, unauthenticated)
    try:
        await asyncio.sleep(seconds)
    finally:
        server.close()
