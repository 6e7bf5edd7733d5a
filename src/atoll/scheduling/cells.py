"""What is counted for each of many keys, such as hosts, at the cost of a few: keys that have always counted alike.

Gangs of a program take all hosts of an island alike, and as much memory of each of their devices. Such keys share a
cell, which is divided when something takes only a part of its keys. What was never divided is united where counts are
equal: hosts come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Count = TypeVar("Count")


@dataclass(slots=True, eq=False)
class Cell(Generic[Key, Count]):
    """Keys, and what is counted for each of them."""

    keys: set[Key]
    count: Count
    was_divided: bool = False  # then it stays as it is: who asks for parts will do so again


class Cells(Generic[Key, Count]):
    """Every key that was asked for is in one cell.

    `copy(count)` makes a count of its own for a part of a cell, and `content(count)` is equal for equal counts.
    `version` rises whenever cells change: what `of` has returned before does not count any more.
    """

    def __init__(self, copy: Callable[[Count], Count], content: Callable[[Count], Hashable]) -> None:
        self.version = 0
        self._copy = copy
        self._content = content
        self._cells: dict[Key, Cell[Key, Count]] = {}

    def get(self, key: Key) -> Count | None:
        cell = self._cells.get(key)
        return None if cell is None else cell.count

    def of(self, keys: Iterable[Key], new: Callable[[], Count]) -> list[Cell[Key, Count]]:
        """The cells that have these keys and no others. Keys that are not known yet share a `new` count."""
        wanted: dict[Cell[Key, Count] | None, set[Key]] = {}
        for key in keys:
            wanted.setdefault(self._cells.get(key), set()).add(key)
        found = []
        for cell, some in wanted.items():
            if cell is None:
                found.append(self._make(some, new(), False))
            elif len(some) == len(cell.keys):
                found.append(cell)
            else:
                cell.keys -= some
                cell.was_divided = True
                found.append(self._make(some, self._copy(cell.count), True))
        return self._united(found) if len(found) > 1 else found

    def _make(self, keys: set[Key], count: Count, divided: bool) -> Cell[Key, Count]:
        cell = Cell(keys, count, divided)
        self._cells.update(dict.fromkeys(keys, cell))
        self.version += 1
        return cell

    def _united(self, cells: list[Cell[Key, Count]]) -> list[Cell[Key, Count]]:
        alike: dict[Hashable, list[Cell[Key, Count]]] = {}
        for cell in cells:
            alike.setdefault(id(cell) if cell.was_divided else (self._content(cell.count),), []).append(cell)
        return [
            each[0] if len(each) == 1 else self._make(set().union(*(cell.keys for cell in each)), each[0].count, False)
            for each in alike.values()
        ]

    def __iter__(self) -> Iterator[Cell[Key, Count]]:
        return iter({id(cell): cell for cell in self._cells.values()}.values())

    def items(self) -> Iterator[tuple[Key, Count]]:
        return ((key, cell.count) for key, cell in self._cells.items())
