"""The checks of messages, made before the controller changes anything.

`Admission.received` calls `validate` or `validate_from_session` for each message before it is handled. Each message
type has one pure function in `VALIDATORS`, or is listed in `NOTHING_TO_VALIDATE`. The function raises a violation, an
INVALID_ARGUMENT error that names the message, the field and the value. A request that is well-formed and fails for
another reason, such as an unknown array, is not a violation: its handler answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.cluster.topology import Topology
from atoll.controller.validation.hosts import HOSTS, NOTHING_FROM_HOSTS
from atoll.controller.validation.operators import NOTHING_FROM_OPERATORS, OPERATORS
from atoll.controller.validation.proxies import NOTHING_FROM_PROXIES, PROXIES
from atoll.scheduling.session import Session

__all__ = ["NOTHING_TO_VALIDATE", "VALIDATORS", "validate", "validate_from_session"]

# The functions by message type, for messages that a session's proxy sends and for all others.
VALIDATORS: Mapping[type[Any], Callable[..., None]] = {**OPERATORS, **HOSTS, **PROXIES}
NOTHING_TO_VALIDATE = NOTHING_FROM_PROXIES | NOTHING_FROM_OPERATORS | NOTHING_FROM_HOSTS


def validate_from_session(session: Session, message: Any, topology: Topology) -> None:
    """Check a message of a session's proxy. Raises StatusError for a violation."""
    validator = PROXIES.get(type(message))
    if validator is not None:
        validator(session, message, topology)


def validate(message: Any, topology: Topology) -> None:
    """Check a message of a worker, an agent, the engine or a command. Raises StatusError for a violation."""
    validator = HOSTS.get(type(message)) or OPERATORS.get(type(message))
    if validator is not None:
        validator(message, topology)
