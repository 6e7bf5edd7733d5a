"""The credentials of this process, read from its environment so that no command line shows them.

`ATOLL_JOIN` holds the join token of a cluster on TLS, either that of clients or that of hosts. `ATOLL_TOKEN` holds the
token of a cluster without TLS. There, hosts and the engine use a separate token, which the engine creates.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from atoll.cluster.environment_variables import HOST_TOKEN, INSECURE, TOKEN
from atoll.errors import AtollError, ConnectError
from atoll.retries import Retry
from atoll.security.enrollment import Renewal, enroll, enroll_anywhere
from atoll.security.join_token import JoinToken, join_of_environment
from atoll.security.roles import Role
from atoll.wire.address import Address
from atoll.wire.sockets import lacks_trust
from atoll.wire.tls.identity import Certificate, Identity
from atoll.wire.tls.tls_errors import no_identity

_RETRY_SECONDS = 0.05


def is_insecure() -> bool:
    """Return whether the environment allows TCP without TLS."""
    return bool(INSECURE.get())


def token_for(address: Address, role: Role) -> str:
    """Return the token for a Hello to the controller at `address`. Raises AccessError for an invalid join token."""
    join = join_of_environment() if address.tls else None
    if join is not None:
        return join.token
    token = TOKEN.text() or (token_beside(address) if role is Role.CLIENT else "")
    return token if role is Role.CLIENT else os.environ.get(HOST_TOKEN.variable, token)


def token_file(directory: str | Path) -> Path:
    """Return the path of the token that Atoll generated for the cluster, for its user's programs and commands."""
    return Path(directory) / "token"


def token_beside(address: Address) -> str:
    """Return the generated token from the cluster's private directory, or "" if the cluster has none."""
    if not address.is_unix:
        return ""
    try:
        return token_file(Path(address.path).parent).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def identity_for(address: Address, role: Role, name: str, patience: float = 0.0) -> Identity | None:
    """Return the identity with which to connect to the controller at `address`, or None for an address without TLS.

    Enrolls with `ATOLL_JOIN`, and renews the certificate until this process exits. Blocks: retries for `patience`
    seconds while the controller is not reachable. Raises AccessError or ConnectError.
    """
    if not address.tls:
        return None
    join = join_of_environment()
    if join is None:
        raise no_identity(address, "the Atoll controller")
    join = replace(join, address=address)  # `address` is the one in use of several
    identity = joined(join, role, name, patience)
    Renewal(identity, lambda: renewed(identity, join, name))
    return identity


def renewed(identity: Identity, join: JoinToken, name: str) -> Certificate:
    """Return a new certificate for `identity`, from a controller that has taken over or from that of the join token."""
    for address in identity.elsewhere:
        with contextlib.suppress(AtollError, OSError):
            return enroll(replace(join, address=address), Role(identity.role), name)
    certificate, _ = enroll_anywhere(join, Role(identity.role), name)
    return certificate


def joined(join: JoinToken, role: Role, name: str, patience: float = 0.0) -> Identity:
    """Return an identity for a short-lived process: its certificate is not renewed. Arguments as in `identity_for`.

    With several addresses, a peer without trust at one of them does not end the attempts at the others.
    """
    retry = Retry(_RETRY_SECONDS, patience=patience)
    while True:
        try:
            certificate, issuer = enroll_anywhere(join, role, name)
        except ConnectError as error:
            if lacks_trust(error) or retry.is_over:
                raise
        else:
            return Identity(certificate, issuer)
        time.sleep(retry.next_pause())


class KeptIdentities:
    """The identities of a process that sends many requests with few join tokens, such as a command. Thread-safe.

    They stay in memory, so no file holds a private key. Each is used for at most half of its certificate's validity.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[JoinToken, tuple[Identity, float]] = {}

    def of(self, join: JoinToken, name: str) -> Identity:
        """Return the identity of a client with this join token. Blocks. Raises as `joined` does."""
        with self._lock:
            identity, until = self._kept.get(join, (None, 0.0))
            if identity is None or self._clock() >= until:
                now, identity = self._clock(), joined(join, Role.CLIENT, name)
                self._kept[join] = identity, now + (identity.certificate.ends - now) / 2
            return identity

    def forget(self, join: JoinToken) -> None:
        """Enroll again for the next request, because the cluster did not accept the identity."""
        with self._lock:
            self._kept.pop(join, None)
