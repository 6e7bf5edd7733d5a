"""The table of messages that each kind of peer may send to the controller. docs/reference/permissions.md shows it.

A peer authenticates with its certificate and its token. Only the cluster's own processes have the cluster's token; a
tenant is a user or an operator. The controller checks each message first (`check`), and refuses it if its sender may
not send it, regardless of its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, get_args

from atoll.errors import Code, StatusError, invalid
from atoll.protocol import messages as m


class PeerKind(StrEnum):
    """A kind of peer with its own permissions."""

    USER = "user"  # a tenant's program or command
    OPERATOR = "operator"  # a program or command of a tenant with the role of an operator
    HOST = "host"  # a worker or a host agent
    ENGINE = "engine"


class Scope(StrEnum):
    """The objects to which a permission applies."""

    OWN = "its own"  # sessions of the peer, and their objects
    ALL = "all"


_ANYBODY = {peer: Scope.OWN for peer in PeerKind}
_CLIENT = {PeerKind.USER: Scope.OWN, PeerKind.OPERATOR: Scope.OWN}
_HOST = {PeerKind.HOST: Scope.OWN}
_ENGINE = {PeerKind.ENGINE: Scope.ALL}
_SEES = {PeerKind.USER: Scope.OWN, PeerKind.OPERATOR: Scope.ALL}
_OPERATOR = {PeerKind.OPERATOR: Scope.ALL}

_BY_OPERATORS: dict[type[Any], dict[PeerKind, Scope]] = {
    m.StatusRequest: _SEES,
    m.TraceRequest: _SEES,
    m.RecordRequest: _SEES,
    m.UsageRequest: _SEES,
    m.RemapRequest: _SEES,
    m.SuspendRequest: _SEES,
    m.ResumeRequest: _SEES,
    m.EndSessionRequest: _SEES,
    m.RemoveArraysRequest: _SEES,
    m.DumpRequest: _OPERATOR,
    m.CheckRequest: _OPERATOR,
    m.StopRequest: _OPERATOR,
    m.AddIslandRequest: _OPERATOR,
    m.DrainRequest: _OPERATOR | _ENGINE,
    m.UndrainRequest: _OPERATOR,
    m.SetTenant: _OPERATOR,
    m.RemoveTenant: _OPERATOR,
}

# Permissions by message. All peers may send Hello, with which they authenticate.
PERMISSIONS: dict[type[Any], dict[PeerKind, Scope]] = {m.Hello: _ANYBODY}
for _messages, _peers in (
    (m.FromProxy, _CLIENT),
    (m.FromWorker, _HOST),
    (m.FromRelay, _HOST),
    (m.FromProcessRelay, _HOST),
    (m.AgentSays, _HOST),
    (m.FromEngine, _ENGINE),
):
    for _message in get_args(_messages) or (_messages,):
        PERMISSIONS[_message] = PERMISSIONS.get(_message, {}) | _peers
for _message, _peers in _BY_OPERATORS.items():
    PERMISSIONS[_message] = PERMISSIONS.get(_message, {}) | _peers

# Messages that a connection can send after its Hello, by the role in the Hello. A worker and a proxy that have not
# joined yet have their own roles.
ROLES: dict[str, frozenset[type[Any]]] = {
    "proxy": frozenset(get_args(m.FromProxy)),
    "waiting proxy": frozenset(),
    "worker": frozenset((*get_args(m.FromWorker), *get_args(m.FromRelay))) - {m.WorkerReady},
    "joining worker": frozenset((m.WorkerReady,)),
    "relay": frozenset(get_args(m.FromProcessRelay)),
    "agent": frozenset((m.AgentSays,)),
    "engine": frozenset(get_args(m.FromEngine)),
    "spare engine": frozenset(),
    "operator": frozenset(get_args(m.FromOperator)),
}
_NAMES = {"agent": "a host agent", "engine": "an engine", "spare engine": "a spare engine", "operator": "an operator"}
_PEERS = {
    "worker": (PeerKind.HOST,),
    "joining worker": (PeerKind.HOST,),
    "relay": (PeerKind.HOST,),
    "agent": (PeerKind.HOST,),
    "engine": (PeerKind.ENGINE,),
    "spare engine": (PeerKind.ENGINE,),
}  # peers with other roles are tenants

# The request of each command, for the table in the documentation.
COMMANDS: dict[str, type[Any]] = {
    "atoll status": m.StatusRequest,
    "atoll top": m.StatusRequest,
    "atoll web": m.StatusRequest,
    "atoll metrics": m.StatusRequest,
    "atoll why": m.StatusRequest,
    "atoll bundle": m.StatusRequest,
    "atoll arrays": m.StatusRequest,
    "atoll ps": m.StatusRequest,
    "atoll arrays rm": m.RemoveArraysRequest,
    "atoll tenants": m.StatusRequest,
    "atoll trace": m.TraceRequest,
    "atoll usage": m.UsageRequest,
    "atoll remap": m.RemapRequest,
    "atoll suspend": m.SuspendRequest,
    "atoll resume": m.ResumeRequest,
    "atoll end-session": m.EndSessionRequest,
    "atoll dump": m.DumpRequest,
    "atoll check": m.CheckRequest,
    "atoll down": m.StopRequest,
    "atoll add-island": m.AddIslandRequest,
    "atoll drain": m.DrainRequest,
    "atoll undrain": m.UndrainRequest,
    "atoll tenants set": m.SetTenant,
    "atoll tenants add": m.SetTenant,
    "atoll tenants remove": m.RemoveTenant,
}


def scope_of(peer: PeerKind, message: type[Any]) -> Scope | None:
    """Return the scope of the peer's permission to send the message, or None if it has none."""
    return PERMISSIONS.get(message, {}).get(peer)


# By role, the messages that every peer with that role may send. `check` decides on the others.
ALWAYS: dict[str, frozenset[type[Any]]] = {
    role: frozenset(
        message for message in kinds if all(scope_of(peer, message) for peer in _PEERS.get(role, tuple(_CLIENT)))
    )
    for role, kinds in ROLES.items()
}


def check(role: str, peer: PeerKind, message: type[Any], name: str = "") -> None:
    """Raise StatusError if a peer with this name may not send such a message on a connection of this role."""
    if message not in ROLES[role]:
        raise invalid(f"{_NAMES.get(role, f'a {role}')} does not send {message.__name__}")
    if scope_of(peer, message) is None:
        text = (
            f"tenant {name} is a user of this cluster, and only its operators may do this: ask one, or use the join "
            "token or token of an operator"
        )
        raise StatusError(Code.PERMISSION_DENIED, text)


def table() -> str:
    """Return the tables of commands and of messages as Markdown, each below its heading."""
    commands = _rows(
        "command", [(f"`{each}`", message) for each, message in COMMANDS.items()], (PeerKind.USER, PeerKind.OPERATOR)
    )
    by_name = sorted(PERMISSIONS, key=lambda each: each.__name__)
    sent = _rows("message", [(each.__name__, each) for each in by_name], tuple(PeerKind))
    return f"## Commands\n\n{commands}\n## Messages\n\nProcesses and commands send these messages:\n\n{sent}"


def _rows(name: str, entries: Sequence[tuple[str, type[Any]]], peers: Sequence[PeerKind]) -> str:
    """Return the table with one row per entry and one column per peer."""
    rows = [(name, *map(str, peers)), ("---",) * (1 + len(peers))]
    rows += [(text, *(str(scope_of(peer, message) or "-") for peer in peers)) for text, message in entries]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
