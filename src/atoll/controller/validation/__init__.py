"""Validation of messages, before the controller changes anything.

`Admission.received` validates each message, and `ProxyMessages` validates those of sessions when their turn comes. Each
message type has a pure function in `VALIDATORS`, or is listed in `NOTHING_TO_VALIDATE`. The function raises a
violation, which is an INVALID_ARGUMENT error that names the message, the field and the value. A well-formed request
that fails for another reason, such as an unknown array, is not a violation: its handler answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.cluster.topology import Topology
from atoll.controller.validation.peer_validation import HOSTS, NOTHING_FROM_HOSTS, NOTHING_FROM_OPERATORS, OPERATORS
from atoll.controller.validation.proxy_validation import NOTHING_FROM_PROXIES, PROXIES
from atoll.protocol.permissions import ALWAYS

__all__ = ["ALLOWED", "NOTHING_TO_VALIDATE", "PROXIES", "VALIDATORS", "validate"]

# The functions by message type, for all messages except those of a session's proxy, and for all messages.
_OTHERS: Mapping[type[Any], Callable[..., None]] = {**OPERATORS, **HOSTS}
VALIDATORS: Mapping[type[Any], Callable[..., None]] = {**_OTHERS, **PROXIES}
NOTHING_TO_VALIDATE = NOTHING_FROM_PROXIES | NOTHING_FROM_OPERATORS | NOTHING_FROM_HOSTS

# By role, the messages that every peer with the role may send, and the functions that validate them on receipt. A
# connection without a Hello has the role "", and `Admission` examines its first message itself.
ALLOWED: Mapping[str, Mapping[type[Any], Callable[..., None] | None]] = {
    role: {kind: None if role == "proxy" else _OTHERS.get(kind) for kind in kinds}
    for role, kinds in {**ALWAYS, "": ()}.items()
}


def validate(message: Any, topology: Topology) -> None:
    """Validate a message of a worker, an agent, the engine or a command. Raises StatusError for a violation."""
    validator = _OTHERS.get(type(message))
    if validator is not None:
        validator(message, topology)
