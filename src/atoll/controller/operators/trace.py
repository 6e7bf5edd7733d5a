"""What ran where and when: the last gangs of all sessions, host by host.

A gang occupies its host from its turn there, or the end of the one before it, to its own end, by the host's clock.
"""

from __future__ import annotations

from collections import deque

from atoll.protocol.spans import Span

MOST_SPANS = 100_000


class Trace:
    """Keeps the last spans."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int, int, str, str, int, int, int, int]] = deque(maxlen=MOST_SPANS)

    def add(
        self,
        island: int,
        host: int,
        session: int,
        program: str,
        work: str,
        sequence: int,
        started: int,
        ended: int,
        nodes: int = 1,
    ) -> None:
        # As plain tuples, which the garbage collector leaves alone: this is on the path of each gang.
        self._spans.append((island, host, session, program, work, sequence, started, ended, nodes))

    def spans(self, since: int = 0) -> list[Span]:
        """Those that ended after `since`, in the order in which their ends were heard of."""
        return [Span(*each) for each in self._spans if each[7] >= since]
