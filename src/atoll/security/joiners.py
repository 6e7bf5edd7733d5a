"""Who connects by TLS without a certificate: they get one, if they have the token, and nothing else.

They are no business of the core: what they ask for has random numbers and clocks in it, and changes nothing it decides.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from atoll.security.enrollment import ENROLL_SECONDS, Desk, FromJoiner, NotEnrolled, Renewal
from atoll.security.guesses import TOO_MANY, Guesses
from atoll.security.roles import Role
from atoll.security.start_security import load_authority
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
        self._guesses = Guesses()
        self.identity = Identity(authority.certificate_for(Role.CONTROLLER, _NAME))
        self._renewal = Renewal(self.identity, lambda: authority.certificate_for(Role.CONTROLLER, _NAME))

    def serve(self, connection: Connection) -> None:
        """Answers the one question of a connection, which is to come soon."""
        connection.name = "a process that joins"
        connection.expect(FromJoiner, partial(self._answer, connection))
        deadline = asyncio.get_running_loop().call_later(ENROLL_SECONDS, connection.close)
        connection.on_lost = lambda reason: deadline.cancel()

    def _answer(self, connection: Connection, message: Any) -> None:
        now, peer = asyncio.get_running_loop().time(), connection.peer
        if not self._guesses.may_try(peer, now):
            answer: Any = NotEnrolled(TOO_MANY)
        else:
            answer = self._desk.answer(message)
            if isinstance(answer, NotEnrolled):
                self._guesses.wrong(peer, now)
        if isinstance(answer, NotEnrolled):
            connection.refuse(answer.reason)
        connection.send(answer)
        connection.close()

    def close(self) -> None:
        """The controller's certificate is not renewed any more."""
        self._renewal.close()
