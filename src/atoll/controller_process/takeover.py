"""When a standby takes over: the hosts decide.

A standby cannot tell a controller that is gone from one that it cannot hear. So it goes by those whom a controller is
for: it takes over once more than half of the hosts have come to it, which they do where they do not reach the
controller. From then on they obey the later term alone, and the earlier controller, if it still runs somewhere, is left
with too few.

Pure: times come in.
"""

from __future__ import annotations

import math
from collections.abc import Collection

# Without a word of the controller, whose heartbeat comes twice a second, it may be gone.
LEASE_SECONDS = 2.0
# That a host's coming counts for: where it finds nobody, it comes again within a few seconds.
RESUME_ATTEMPT_SECONDS = 5.0
# After which what a standby knows is too old to go on with: the controller has told its peers to do without it by then.
KNOWS_SECONDS = 20.0
# Between the terms of a standby and of the controller before it, which may have been started again unseen.
_TERMS = 1000


class Takeover:
    """What is known of the controller and of the hosts. Times are in seconds of one clock."""

    def __init__(self) -> None:
        self._heard = -math.inf
        self._is_lost = True
        self._resume_attempts: dict[int, float] = {}  # when, by connection

    def heard(self, now: float) -> None:
        """Something of the controller."""
        self._heard, self._is_lost = now, False

    def lost(self) -> None:
        """The connection to the controller has ended."""
        self._is_lost = True

    def on_resume_attempt(self, now: float, connection: int) -> None:
        """A peer has come, to go on with its connection here."""
        self._resume_attempts[connection] = now

    def is_due(self, now: float, hosts: Collection[int]) -> bool:
        """Whether to take over now; `hosts` are the connections of those that the controller had."""
        silent = now - self._heard
        if silent > KNOWS_SECONDS or not (self._is_lost or silent >= LEASE_SECONDS):
            return False
        there = [each for each in hosts if now - self._resume_attempts.get(each, -math.inf) <= RESUME_ATTEMPT_SECONDS]
        return 2 * len(there) > len(hosts)


def next_term(term: int) -> int:
    """That of a standby which takes over from a controller of `term`: none that started the journal again has it."""
    return (term // _TERMS + 1) * _TERMS
