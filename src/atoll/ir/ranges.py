"""Lists of numbers as ranges: devices, hosts and positions mostly follow one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

# (first, count, step)
Range = tuple[int, int, int]


def runs(numbers: Sequence[int]) -> Iterator[Range]:
    """Cuts numbers into ranges; steps other than 1 only where they save something."""
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if step == 0 or (step != 1 and end - at < 3):
            step, end = 1, at + 1
        yield numbers[at], end - at, step
        at = end


def expand(ranges: Iterable[Range]) -> tuple[int, ...]:
    """The numbers that `runs` has cut."""
    return tuple([number for first, count, step in ranges for number in range(first, first + count * step, step)])
