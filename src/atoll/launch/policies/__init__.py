"""Scheduling policies by name, for `--policy` and ATOLL_POLICY. Each is one file here and one line of `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from atoll.cluster.settings import check_known

if TYPE_CHECKING:  # scripts check the names of policies, and do not need the states of the controller
    from atoll.launch.policy import Policy

# Factories of policies, called without arguments once per island. They are imported when chosen.
POLICIES = {
    "fair": "atoll.launch.policies.fair:FairShares",
    "first-come": "atoll.launch.policies.first_come:FirstComeFirstServed",
}


def check_policy(name: str) -> None:
    """Raise SettingsError if there is no policy with this name."""
    check_known("scheduling policy", name, POLICIES)


def find_policy(name: str) -> Callable[[], Policy]:
    """Return the factory of policies with this name. Raise SettingsError if there is no such policy."""
    check_policy(name)
    found: Callable[[], Policy] = resolve_name(POLICIES[name])
    return found
