"""Scheduling policies by name, for `--policy` and ATOLL_POLICY. Each is one file here and one line of `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from atoll.errors import SettingsError
from atoll.scheduling.policy import Policy

# Where each is: what makes the policy of an island, called without arguments. Imported when chosen.
POLICIES = {
    "first-come": "atoll.scheduling.policies.first_come:FirstComeFirstServed",
}


def find_policy(name: str) -> Callable[[], Policy]:
    """What makes policies of that name. Raises SettingsError where there are none."""
    try:
        module, factory = POLICIES[name].split(":")
    except KeyError:
        raise SettingsError(f"there is no scheduling policy {name!r}: expected {' or '.join(POLICIES)}") from None
    found: Callable[[], Policy] = getattr(import_module(module), factory)
    return found
