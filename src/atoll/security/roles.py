"""The roles that certificates have, and what a process of each may be to the controller.

There is a token for hosts and one for clients: who knows a client's is no host. A certificate of an engine is made by
the engine itself, which has the authority; nobody can join as one.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    CONTROLLER = "controller"
    ENGINE = "engine"
    HOST = "host"
    CLIENT = "client"


# The roles that a joiner can have, and so the tokens that there are.
JOINING = (Role.HOST, Role.CLIENT)

# How each introduces itself: `protocol.messages.Hello.role`.
_SAYS = {
    Role.CONTROLLER: frozenset[str](),
    Role.ENGINE: frozenset({"engine", "standby"}),
    Role.HOST: frozenset({"worker", "agent"}),
    Role.CLIENT: frozenset({"proxy", "operator"}),
}


def may_say(certified: str, said: str) -> bool:
    """Whether who has a certificate of that role may introduce itself so. Without certificates ("") anybody may."""
    return not certified or said in _SAYS.get(Role(certified), frozenset())


def is_of_the_cluster(said: str) -> bool:
    """Whether it is the cluster's own processes that introduce themselves so: they have the token of hosts."""
    return said in _SAYS[Role.ENGINE] | _SAYS[Role.HOST]
