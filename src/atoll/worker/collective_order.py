"""In which order a host starts collectives: the one in which they came, as on all hosts of its island. Pure.

Invariant: none starts before an earlier one that waits for its bytes here, or that was left out here and may have begun
elsewhere: another host that waits in that one would take the later one for it, and end.
"""

from __future__ import annotations

from itertools import chain


class CollectiveOrder:
    """Each collective has a place among all that have come, from 1 on."""

    def __init__(self) -> None:
        self._count = 0
        self._parked: set[int] = set()  # places
        self._left_out: dict[int, int] = {}  # places, by the sequence numbers of their units

    def came(self) -> int:
        """One more; returns its place."""
        self._count += 1
        return self._count

    def park(self, place: int) -> None:
        """It waits, and all that come after it do."""
        self._parked.add(place)

    def unpark(self, place: int) -> None:
        """It was started, dropped, or left out."""
        self._parked.discard(place)

    def leave_out(self, sequence: int, place: int) -> None:
        """It is not started here, and others wait for it until it has `ended` everywhere."""
        self._left_out[sequence] = place

    def ended(self, sequence: int) -> bool:
        """The unit of this number has ended on all hosts; whether it was a collective that was left out here."""
        return self._left_out.pop(sequence, None) is not None

    def may_start(self, place: int) -> bool:
        """Whether no earlier one is to be waited for."""
        if not self._parked and not self._left_out:  # nearly always
            return True
        return all(place <= each for each in chain(self._parked, self._left_out.values()))
