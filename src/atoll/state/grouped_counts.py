"""Count for each of many keys, such as hosts, at the cost of a few groups of keys that have always counted alike.

Gangs of a program take all hosts of an island alike, and as much memory of each of their devices. Such keys share a
group, which is divided when something takes only a part of its keys. What was never divided is united where counts are
equal: hosts come one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Count = TypeVar("Count")


@dataclass(slots=True, eq=False)
class CountGroup(Generic[Key, Count]):
    """Keys, and what is counted for each of them."""

    keys: set[Key]
    count: Count
    was_divided: bool = False  # then it stays as it is: who asks for parts will do so again


class GroupedCounts(Generic[Key, Count]):
    """Every key that was asked for is in one group.

    `copy(count)` makes a count of its own for a part of a group, and `content(count)` is equal for equal counts.
    `version` rises whenever groups change: what `of` has returned before does not count any more.
    """

    def __init__(self, copy: Callable[[Count], Count], content: Callable[[Count], Hashable]) -> None:
        self.version = 0
        self._copy = copy
        self._content = content
        self._groups: dict[Key, CountGroup[Key, Count]] = {}

    def get(self, key: Key) -> Count | None:
        group = self._groups.get(key)
        return None if group is None else group.count

    def of(self, keys: Iterable[Key], new: Callable[[], Count]) -> list[CountGroup[Key, Count]]:
        """The groups that have these keys and no others. Keys that are not known yet share a `new` count."""
        wanted: dict[CountGroup[Key, Count] | None, set[Key]] = {}
        for key in keys:
            wanted.setdefault(self._groups.get(key), set()).add(key)
        found = []
        for group, some in wanted.items():
            if group is None:
                found.append(self._make(some, new(), False))
            elif len(some) == len(group.keys):
                found.append(group)
            else:
                group.keys -= some
                group.was_divided = True
                found.append(self._make(some, self._copy(group.count), True))
        return self._united(found) if len(found) > 1 else found

    def _make(self, keys: set[Key], count: Count, divided: bool) -> CountGroup[Key, Count]:
        group = CountGroup(keys, count, divided)
        self._groups.update(dict.fromkeys(keys, group))
        self.version += 1
        return group

    def _united(self, groups: list[CountGroup[Key, Count]]) -> list[CountGroup[Key, Count]]:
        alike: dict[Hashable, list[CountGroup[Key, Count]]] = {}
        for group in groups:
            alike.setdefault(id(group) if group.was_divided else (self._content(group.count),), []).append(group)
        return [
            each[0]
            if len(each) == 1
            else self._make(set().union(*(group.keys for group in each)), each[0].count, False)
            for each in alike.values()
        ]

    def __iter__(self) -> Iterator[CountGroup[Key, Count]]:
        return iter({id(group): group for group in self._groups.values()}.values())

    def items(self) -> Iterator[tuple[Key, Count]]:
        return ((key, group.count) for key, group in self._groups.items())
