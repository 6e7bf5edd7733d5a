"""The distinct parts that a tiling cuts an array into."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import product

from atoll.ir.types import Box


class Grid:
    """The distinct boxes of a tiling, which cut the array along lines through all of it, and who holds each."""

    def __init__(self, boxes: tuple[Box, ...]) -> None:
        self.origins: dict[Box, list[int]] = {}  # positions, by box
        for position, box in enumerate(boxes):
            self.origins.setdefault(box, []).append(position)
        rank = len(boxes[0]) if boxes else 0
        cuts = [sorted({box[d] for box in self.origins if box[d][0] < box[d][1]}) for d in range(rank)]
        self._intervals = [(cut, [start for start, _ in cut], [stop for _, stop in cut]) for cut in cuts]

    def overlapping(self, wanted: Box) -> list[tuple[Box, list[int]]]:
        """The boxes that share elements with `wanted`, and the positions that hold each."""
        choices = []
        for (start, stop), (cut, starts, stops) in zip(wanted, self._intervals, strict=True):
            if start >= stop:
                return []
            choices.append(cut[bisect_right(stops, start) : bisect_left(starts, stop)])
        return [(box, self.origins[box]) for box in product(*choices)]
