"""The roles in certificates, and the roles that each may claim in a Hello.

A client's token does not admit hosts. Only the engine, which holds the CA, can create a certificate of an
engine; no process can join in that role.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    CONTROLLER = "controller"
    ENGINE = "engine"
    HOST = "host"
    CLIENT = "client"


JOINING = (Role.HOST, Role.CLIENT)  # each of these roles has a token

# The values of `protocol.messages.Hello.role` that the certificate of each role allows.
_CLAIMS = {
    Role.CONTROLLER: frozenset[str](),
    Role.ENGINE: frozenset({"engine", "spare engine", "standby"}),
    Role.HOST: frozenset({"worker", "relay", "agent"}),
    Role.CLIENT: frozenset({"proxy", "operator"}),
}


def may_claim(certified: str, claimed: str) -> bool:
    """Return whether a process whose certificate has the role `certified` may claim the role `claimed` in its Hello.

    Without certificates, `certified` is "" and every role is allowed.
    """
    return not certified or claimed in _CLAIMS.get(Role(certified), frozenset())


def is_of_the_cluster(role: str) -> bool:
    """Return whether processes with the role `role` belong to the cluster and use the token of hosts."""
    return role in _CLAIMS[Role.ENGINE] | _CLAIMS[Role.HOST]
