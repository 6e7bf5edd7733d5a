"""Who may say what to the controller: the one table, of which docs/security.md shows every line.

A peer is known by its certificate and its token. The cluster's own processes have a token that no tenant has; a tenant
is a user or an operator. A message that is not in the table for its sender is refused, whatever is in it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args

from atoll.protocol import messages as m


class Peer(StrEnum):
    """Who is at a connection, as far as rights go."""

    USER = "user"  # a tenant's program, or command
    OPERATOR = "operator"  # the same of a tenant with that role
    HOST = "host"  # a worker, or a host agent
    ENGINE = "engine"


class Scope(StrEnum):
    """About what."""

    OWN = "its own"  # sessions, and what belongs to them
    ALL = "all"


_ANYBODY = {peer: Scope.OWN for peer in Peer}
_CLIENT = {Peer.USER: Scope.OWN, Peer.OPERATOR: Scope.OWN}
_HOST = {Peer.HOST: Scope.OWN}
_ENGINE = {Peer.ENGINE: Scope.ALL}
_SEES = {Peer.USER: Scope.OWN, Peer.OPERATOR: Scope.ALL}
_OPERATOR = {Peer.OPERATOR: Scope.ALL}

_BY_OPERATORS: dict[type[Any], dict[Peer, Scope]] = {
    m.StatusRequest: _SEES,
    m.TraceRequest: _SEES,
    m.RecordRequest: _SEES,
    m.UsageRequest: _SEES,
    m.RemapRequest: _SEES,
    m.SuspendRequest: _SEES,
    m.ResumeRequest: _SEES,
    m.EndSessionRequest: _SEES,
    m.DumpRequest: _OPERATOR,
    m.CheckRequest: _OPERATOR,
    m.StopRequest: _OPERATOR,
    m.AddIslandRequest: _OPERATOR,
    m.DrainRequest: _OPERATOR | _ENGINE,
    m.SetTenant: _OPERATOR,
    m.RemoveTenant: _OPERATOR,
}

# By message. Hello is what says who it is.
PERMISSIONS: dict[type[Any], dict[Peer, Scope]] = {m.Hello: _ANYBODY}
for _messages, _peers in (
    (m.FromProxy, _CLIENT),
    (m.FromWorker, _HOST),
    (m.FromRelay, _HOST),
    (m.AgentSays, _HOST),
    (m.FromEngine, _ENGINE),
):
    for _message in get_args(_messages) or (_messages,):
        PERMISSIONS[_message] = PERMISSIONS.get(_message, {}) | _peers
for _message, _peers in _BY_OPERATORS.items():
    PERMISSIONS[_message] = PERMISSIONS.get(_message, {}) | _peers

# What each command asks, for the table.
COMMANDS: dict[str, type[Any]] = {
    "atoll status": m.StatusRequest,
    "atoll top": m.StatusRequest,
    "atoll web": m.StatusRequest,
    "atoll metrics": m.StatusRequest,
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
    "atoll tenants set": m.SetTenant,
    "atoll tenants add": m.SetTenant,
    "atoll tenants remove": m.RemoveTenant,
}


def scope_of(peer: Peer, message: type[Any]) -> Scope | None:
    """About what such a peer may say that; None where it may not."""
    return PERMISSIONS.get(message, {}).get(peer)


def table() -> str:
    """All of it, as Markdown."""
    rows = [("command or message", *(str(peer) for peer in Peer)), ("---",) * (1 + len(Peer))]
    entries = [(f"`{command}`", message) for command, message in COMMANDS.items()]
    entries += [(message.__name__, message) for message in sorted(PERMISSIONS, key=lambda each: each.__name__)]
    rows += [(text, *(str(scope_of(peer, message) or "-") for peer in Peer)) for text, message in entries]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
