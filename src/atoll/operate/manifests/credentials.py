"""What a cluster's processes prove themselves with, made before the cluster: for those that start it elsewhere."""

from __future__ import annotations

import secrets

from atoll.cluster.security.access import HOST_TOKEN_VARIABLE, TOKEN_VARIABLE
from atoll.cluster.security.authority import Authority
from atoll.cluster.security.join import JOIN_VARIABLE, JoinString
from atoll.cluster.security.start import AUTHORITY_VARIABLE
from atoll.wire.address import parse_address

_TOKEN_BYTES = 32


def make_credentials(address: str) -> dict[str, dict[str, str]]:
    """The environment of a cluster's "controller", "host" and "client", where its controller is at HOST:PORT."""
    authority = Authority.make()
    token, host_token = secrets.token_urlsafe(_TOKEN_BYTES), secrets.token_urlsafe(_TOKEN_BYTES)
    where = parse_address(address).secured()

    def join(token: str) -> dict[str, str]:
        return {JOIN_VARIABLE: str(JoinString(where, authority.fingerprint, token))}

    return {
        "controller": {
            AUTHORITY_VARIABLE: authority.with_key.decode(),
            TOKEN_VARIABLE: token,
            HOST_TOKEN_VARIABLE: host_token,
        },
        "host": join(host_token),
        "client": join(token),
    }
