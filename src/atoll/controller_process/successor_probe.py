"""Ask the standby of an earlier controller whether it has taken over.

A controller that continues from a journal would otherwise serve a second cluster beside the one of the standby. Its
hosts are connected to the standby, so none of them tells the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from atoll.controller_process.controller_identities import own_identity
from atoll.errors import AddressError, ConnectError
from atoll.journal.files import JournalDirectory
from atoll.journal.successor import Successor
from atoll.security.roles import Role
from atoll.wire.address import parse_address
from atoll.wire.endpoints import connect
from atoll.wire.resumption.accepted_link import CONTROLLERS, Acceptor
from atoll.wire.resumption.link_messages import Resume, ResumeRefused

_log = logging.getLogger(__name__)

_SECONDS = 2.0  # for the standby to answer


async def later_controller(directory: JournalDirectory, acceptor: Acceptor, authority: str) -> Successor | None:
    """Return the controller that has taken over from the journal's one, or None if none is known.

    Args:
      directory: The directory of the journal. The answer of a standby is recorded there.
      acceptor: The term and the key of the journal's controller.
      authority: The directory with the cluster's certificate authority.
    """
    found = directory.successor()
    if found.term > acceptor.term:
        return found
    if not found.address:
        return None
    answer = await _answer_of(found, acceptor, authority)
    if answer is None or answer.term <= acceptor.term:
        return None
    found = Successor(answer.address or found.address, answer.term)
    with contextlib.suppress(OSError):  # the next start asks again
        directory.write_successor(found)
    return found


async def _answer_of(standby: Successor, acceptor: Acceptor, authority: str) -> ResumeRefused | None:
    """Return the answer of the standby, which has the term that it serves or follows, or None if it does not answer."""
    answer: asyncio.Future[ResumeRefused | None] = asyncio.get_running_loop().create_future()

    def done(message: Any) -> None:
        if not answer.done():
            answer.set_result(message if isinstance(message, ResumeRefused) else None)

    try:
        address = parse_address(standby.address)
        connection = await connect(
            address,
            Any,
            done,
            done,
            name="the standby",
            on_link=done,
            timeout=_SECONDS,
            identity=own_identity(address, authority, Role.ENGINE, "a controller"),
        )
        try:
            connection.send_link(Resume(CONTROLLERS, acceptor.secret(CONTROLLERS), acceptor.term, 0, 0, 1))
            async with asyncio.timeout(_SECONDS):
                return await answer
        finally:
            connection.abort()
    except (AddressError, ConnectError, TimeoutError) as error:
        reason = str(error) or f"it does not answer within {_SECONDS:.0f} s"
        _log.warning("cannot ask %s whether it has taken over: %s", standby, reason)
        return None
