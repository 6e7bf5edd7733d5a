"""Who connects by TLS without a certificate: they get one, if they have the token, and nothing else.

They are no business of the core: what they ask for has random numbers and clocks in it, and changes nothing it decides.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from atoll.security.enrollment import ENROLL_SECONDS, Desk, FromJoiner, Renewal
from atoll.security.roles import Role
from atoll.security.start import load_authority
from atoll.security.tokens import Tokens
from atoll.wire.connection import Connection
from atoll.wire.tls.identity import Identity

_NAME = "the controller"


class Joiners:
    """Gives them certificates. `identity` is the controller's own, which it signs and renews itself.

    Raises AccessError where `directory` has no authority.
    """

    def __init__(self, directory: str, tokens: Tokens) -> None:
        authority = load_authority(directory)
        self._desk = Desk(
            authority,
            {Role.CLIENT: tokens.client, Role.HOST: tokens.host},
            lambda said: tokens.tenant_of(said) is not None,
        )
        self.identity = Identity(authority.certificate_for(Role.CONTROLLER, _NAME))
        Renewal(self.identity, lambda: authority.certificate_for(Role.CONTROLLER, _NAME))

    def serve(self, connection: Connection) -> None:
        """Answers what a connection asks, which is to be soon."""
        connection.name = "a process that joins"
        connection.expect(FromJoiner, partial(self._answer, connection))
        deadline = asyncio.get_running_loop().call_later(ENROLL_SECONDS, connection.close)
        connection.on_lost = lambda reason: deadline.cancel()

    def _answer(self, connection: Connection, message: Any) -> None:
        connection.send(self._desk.answer(message))
