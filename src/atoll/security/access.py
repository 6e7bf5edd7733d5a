"""What this process proves itself with to a cluster: from its environment, where no command line shows it.

ATOLL_JOIN has the join token of a cluster on TCP, of clients or of hosts. ATOLL_TOKEN is the token of a cluster
without TLS; hosts and the engine have one of their own there, which the engine makes.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path

from atoll.errors import AccessError, AtollError, ConnectError, HandshakeCutError
from atoll.security.enrollment import Renewal, enroll
from atoll.security.join_token import JoinToken, join_of_environment
from atoll.security.roles import Role
from atoll.wire.address import Address
from atoll.wire.tls.identity import Certificate, Identity
from atoll.wire.tls.tls_stream import no_identity

TOKEN_VARIABLE = "ATOLL_TOKEN"
HOST_TOKEN_VARIABLE = "ATOLL_HOST_TOKEN"
INSECURE_VARIABLE = "ATOLL_INSECURE"
_RETRY_SECONDS = 0.05


def is_insecure() -> bool:
    """Whether the environment asks for TCP in the clear."""
    return os.environ.get(INSECURE_VARIABLE, "").lower() in ("1", "true", "yes", "on")


def token_for(address: Address, role: Role) -> str:
    """Return the token for a Hello to the controller at this address. Raises AccessError for a bad join token."""
    join = join_of_environment() if address.tls else None
    if join is not None:
        return join.token
    token = os.environ.get(TOKEN_VARIABLE, "") or (token_beside(address) if role is Role.CLIENT else "")
    return token if role is Role.CLIENT else os.environ.get(HOST_TOKEN_VARIABLE, token)


def token_file(directory: str | Path) -> Path:
    """With the cluster's own token, where it has one that nobody chose: for its user's own programs and commands."""
    return Path(directory) / "token"


def token_beside(address: Address) -> str:
    """The cluster's own token, from its directory, which is its user's alone; "" where it has none there."""
    if not address.is_unix:
        return ""
    try:
        return token_file(Path(address.path).parent).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def identity_for(address: Address, role: Role, name: str, patience: float = 0.0) -> Identity | None:
    """What to connect to this controller with, and then to what belongs to it; None where it is not reached by TLS.

    Joins by ATOLL_JOIN, and renews the certificate for as long as this process lives. Blocks; the controller may yet be
    starting, for so many seconds of `patience`. Raises AccessError, or ConnectError.
    """
    if not address.tls:
        return None
    join = join_of_environment()
    if join is None:
        raise no_identity(address, "the Atoll controller")
    join = replace(join, address=address)  # the controller may have several
    identity = joined(join, role, name, patience)
    Renewal(identity, lambda: renewed(identity, join, name))
    return identity


def renewed(identity: Identity, join: JoinToken, name: str) -> Certificate:
    """A new certificate for it, of the controller of the join token, or the one that has taken over from that."""
    for address in identity.elsewhere:
        with contextlib.suppress(AtollError, OSError):
            return enroll(replace(join, address=address), Role(identity.role), name)
    return enroll(join, Role(identity.role), name)


def joined(join: JoinToken, role: Role, name: str, patience: float = 0.0) -> Identity:
    """The same for a process that is over soon: its certificate is not renewed."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return Identity(enroll(join, role, name))
        except ConnectError as error:
            refused = isinstance(error, AccessError) and not isinstance(error, HandshakeCutError)
            if refused or time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)
