"""Counts for many keys, such as hosts, at the cost of a few groups of keys whose counts have always been equal.

Most gangs use all hosts of their island, and the same amount of memory on each of their devices. Such keys share a
group. A group is divided when only some of its keys are requested. Groups that were never divided are united if their
counts are equal, since hosts are added one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Count = TypeVar("Count")


@dataclass(slots=True, eq=False)
class CountGroup(Generic[Key, Count]):
    """Keys that share one count."""

    keys: set[Key]
    count: Count
    was_divided: bool = False  # if so, it is not united again, since its parts will be requested again


class GroupedCounts(Generic[Key, Count]):
    """The groups. Each key that was requested is in one group.

    `copy(count)` makes a separate count for a part of a group. `content(count)` is equal for equal counts. `version`
    increases whenever groups change, which makes earlier results of `of` invalid.
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
        """Return the groups of these keys, without other keys. Keys that are not known yet share a `new` count."""
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

    def renamed(self, keys: Iterable[Key]) -> GroupedCounts[Key, Count]:
        """Return counts of other keys, which are all those of the only group, if there is one."""
        other: GroupedCounts[Key, Count] = GroupedCounts(self._copy, self._content)
        for group in self:
            other._make(set(keys), self._copy(group.count), False)
        return other

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
