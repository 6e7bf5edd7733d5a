"""In which order a host starts collectives: the one in which they came, as on all hosts of its island. Pure.

Invariant: none starts before an earlier one that waits for its bytes here, or that was left out here and may have begun
elsewhere: another host that waits in that one would take the later one for it, and end.
"""

from __future__ import annotations

from itertools import chain


class CollectiveOrder:
    """Each collective has an index among all that have come, from 1 on."""

    def __init__(self) -> None:
        self._count = 0
        self._blocked: set[int] = set()  # indices
        self._left_out: dict[int, int] = {}  # indices, by the sequence numbers of their units

    def came(self) -> int:
        """One more; returns its index."""
        self._count += 1
        return self._count

    def block(self, index: int) -> None:
        """It waits, and all that come after it do."""
        self._blocked.add(index)

    def unblock(self, index: int) -> None:
        """It was started, dropped, or left out."""
        self._blocked.discard(index)

    def skip(self, sequence: int, index: int) -> None:
        """It is not started here, and others wait for it until it has `ended` everywhere."""
        self._left_out[sequence] = index

    def ended(self, sequence: int) -> bool:
        """The unit of this number has ended on all hosts; whether it was a collective that was left out here."""
        return self._left_out.pop(sequence, None) is not None

    def may_start(self, index: int) -> bool:
        """Whether no earlier one is to be waited for."""
        if not self._blocked and not self._left_out:  # nearly always
            return True
        return all(index <= each for each in chain(self._blocked, self._left_out.values()))
