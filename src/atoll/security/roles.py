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
_SAYS = {
    Role.CONTROLLER: frozenset[str](),
    Role.ENGINE: frozenset({"engine", "spare engine", "standby"}),
    Role.HOST: frozenset({"worker", "relay", "agent"}),
    Role.CLIENT: frozenset({"proxy", "operator"}),
}


def may_say(certified: str, said: str) -> bool:
    """Return whether a process whose certificate has the role `certified` may claim the role `said` in its Hello.

    Without certificates, `certified` is "" and every role is allowed.
    """
    return not certified or said in _SAYS.get(Role(certified), frozenset())


def is_of_the_cluster(said: str) -> bool:
    """Return whether processes with the role `said` belong to the cluster and use the token of hosts."""
    return said in _SAYS[Role.ENGINE] | _SAYS[Role.HOST]
