"""The ranges of the numbers that several processes choose: handles of arrays, feeds, and devices.

A process that chooses a number takes it from its own range, so no two choose the same. Sessions do not share numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import filterfalse

# Handles of a session's arrays.
CLIENT_HANDLES = range(1 << 60)
LOOP_HANDLES = range(1 << 60, 1 << 61)  # the controller, for values that loops carry
COPY_HANDLES = range(1 << 61, 3 << 60)  # the controller, for copies of arrays that migrate
SHARED_HANDLES = range(3 << 60, 1 << 62)  # the controller, for published arrays that a session reads
PROXY_HANDLES = range(1 << 62, 1 << 63)


def is_client_handle(handle: int) -> bool:
    """Return whether a client or its proxy may choose this handle."""
    return handle in CLIENT_HANDLES or handle in PROXY_HANDLES


def first_of_others(handles: Iterable[int]) -> int | None:
    """Return the first handle that neither a client nor its proxy may choose, or None. Without a call per handle."""
    not_of_client = filterfalse(CLIENT_HANDLES.__contains__, handles)
    return next(filterfalse(PROXY_HANDLES.__contains__, not_of_client), None)


# Feeds: bytes that are sent to a host.
CLIENT_FEEDS = range(1 << 46)
SCRIPT_FEEDS = range(1 << 46, 1 << 47)  # the client's process, for contents that hosts send to it and not to its proxy
SPILL_FEEDS = range(1 << 47, 1 << 48)  # the controller, for pieces of spilled arrays
HOST_FEEDS = range(1 << 48, 1 << 62)  # the controller, for what hosts send one another
CALL_FEEDS = range(1 << 62, 1 << 63)  # workers, for calls into the client's Python


def is_call(feed: int) -> bool:
    """Return whether this is the number of a call, an answer or a message between hosts, which never waits."""
    return feed >= CALL_FEEDS.start


# Devices of a session. Migrations copy arrays from devices to what the same devices will be. The devices of published
# arrays are numbered separately.
DEVICES = range(1 << 40)
MIGRATED_DEVICES = range(1 << 40, 1 << 41)
PUBLISHED_DEVICES = range(1 << 41, 1 << 42)
