"""What a cluster's processes prove themselves with, made before the cluster: for those that start it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.security.access import HOST_TOKEN_VARIABLE, TOKEN_VARIABLE
from atoll.security.authority import Authority
from atoll.security.join_token import JOIN_VARIABLE, JoinToken
from atoll.security.persistent_credentials import new_environment
from atoll.security.start_security import AUTHORITY_VARIABLE
from atoll.wire.address import parse_address


def make_credentials(address: str, tenants: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """The environment of a cluster's "controller", "host" and "client", where its controller is at HOST:PORT.

    `tenants` are their tokens by name: each is a "client-NAME".
    """
    controller = new_environment()
    authority = Authority.parse(controller[AUTHORITY_VARIABLE].encode(), AUTHORITY_VARIABLE)
    where = parse_address(address).secured()

    def join(token: str) -> dict[str, str]:
        return {JOIN_VARIABLE: str(JoinToken(where, authority.fingerprint, token))}

    return {
        "controller": controller,
        "host": join(controller[HOST_TOKEN_VARIABLE]),
        "client": join(controller[TOKEN_VARIABLE]),
        **{f"client-{name}": join(token) for name, token in (tenants or {}).items()},
    }
