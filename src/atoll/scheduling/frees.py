"""Buffers that hosts may forget, until they are named to them: once a host and session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# By hosts: the handles.
_Handles = dict[tuple[int, ...], list[int]]


class Frees:
    """What each host may forget, by session; with `delete`, memory goes even while others refer to it."""

    def __init__(self) -> None:
        self._frees: dict[tuple[int, bool], _Handles] = {}  # by session and delete

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._frees

    def add(self, hosts: tuple[int, ...], session: int, handles: Iterable[int], delete: bool) -> None:
        self._frees.setdefault((session, delete), {}).setdefault(hosts, []).extend(handles)

    def forget_session(self, session: int) -> None:
        self._frees.pop((session, False), None)
        self._frees.pop((session, True), None)

    def forget_host(self, host: int) -> None:
        for frees in self._frees.values():
            for hosts in [hosts for hosts in frees if host in hosts]:
                handles = frees.pop(hosts)
                left = tuple(other for other in hosts if other != host)
                if left:
                    frees.setdefault(left, []).extend(handles)

    def take(self) -> Iterator[tuple[tuple[int, ...], int, tuple[int, ...], bool]]:
        """(hosts, session, handles, delete) of all. Hosts that may forget the same come together."""
        taken, self._frees = self._frees, {}
        # What is to be deleted first: a handle that is forgotten cannot be deleted any more.
        for (session, delete), frees in sorted(taken.items(), key=lambda item: not item[0][1]):
            for hosts, handles in (frees if len(frees) == 1 else _by_host(frees)).items():
                yield hosts, session, tuple(handles), delete


def _by_host(frees: _Handles) -> _Handles:
    handles_of: dict[int, list[int]] = {}
    for hosts, handles in frees.items():
        for host in hosts:
            handles_of.setdefault(host, []).extend(handles)
    together: dict[tuple[int, ...], list[int]] = {}
    for host, handles in handles_of.items():
        together.setdefault(tuple(handles), []).append(host)
    return {tuple(hosts): list(handles) for handles, hosts in together.items()}
