"""The identities of a controller and of a standby, which both have the cluster's certificate authority."""

from __future__ import annotations

from atoll.security.enrollment import Renewal
from atoll.security.roles import Role
from atoll.security.start_security import load_certificate_authority
from atoll.wire.address import Address
from atoll.wire.tls.identity import Identity


def own_identity(address: Address, directory: str, role: Role, name: str) -> Identity | None:
    """Return an identity of `role` for connections at `address`, or None without TLS.

    The certificate authority is in the `directory` of the cluster. Raises AccessError if it cannot be read.
    """
    if not address.tls:
        return None
    authority = load_certificate_authority(directory)
    identity = Identity(authority.certificate_for(role, name))
    Renewal(identity, lambda: authority.certificate_for(role, name))
    return identity
