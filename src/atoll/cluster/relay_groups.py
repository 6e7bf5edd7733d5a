"""Which hosts of an island form a group, of which one relays the controller's messages: see `worker.group_relay`."""

from __future__ import annotations

from collections.abc import Sequence


def relay_groups(hosts: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The groups of an island's hosts: each has `size` of them or fewer, the first of which is the relay.

    There are none where the island has fewer hosts than that, or `size` is 0.
    """
    if size < 2 or len(hosts) < size:
        return []
    groups = [tuple(hosts[first : first + size]) for first in range(0, len(hosts), size)]
    return [group for group in groups if len(group) > 1]
