"""Scheduling policies by name, for `--policy` and ATOLL_POLICY. Each is one file here and one line of `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from atoll.errors import ClusterError
from atoll.scheduling.policies.first_come import FirstComeFirstServed
from atoll.scheduling.policy import Policy

# What makes the policy of an island.
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "first-come": FirstComeFirstServed,
}


def find_policy(name: str) -> Callable[[], Policy]:
    """What makes policies of that name. Raises ClusterError where there are none."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ClusterError(f"there is no scheduling policy {name!r}: expected {' or '.join(POLICIES)}") from None
