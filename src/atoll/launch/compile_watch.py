"""Compilations that workers owe: ask about them, request lost ones again, and fail those that make no progress. Pure.

A compilation may take hours, so its age is no sign of a loss. A worker reports what it does about each compilation, and
with the CPU time of the compiler process whether it makes progress. One in a queue may wait for any time: if those that
have a place make no progress, they fail and free their places.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import msgspec

from atoll.protocol import messages as m

# Interval of the questions about a compilation, from its request on.
ASK_SECONDS = 10.0
# Reports in a row by which a worker does not know a compilation. One may have overtaken the request, or its answer.
_UNKNOWN_REPORTS = 2
# Times that the source of a compilation is requested again.
MAX_REQUESTS = 2
# For a compilation whose process uses no CPU time.
STUCK_SECONDS = 600.0
# Functions per question to a host, which reads the CPU time of each compiler process on its receiving thread.
MAX_ASKED = 32


class WatchedCompilation(msgspec.Struct, frozen=True, array_like=True):
    """A compilation on a host, as its session last requested it, and as the worker last reported it."""

    session: int
    feed: int
    asked: float  # time of the last question, or of the request
    is_requested: bool = True  # False while its source is sent again
    requests: int = 0  # for its source, after the first one
    unknown: int = 0  # reports in a row by which the worker does not know it
    report: m.CompileReport | None = None
    since: float = 0.0  # time of the report since which it has made no progress


class Lost(NamedTuple):
    """The worker does not know the compilation. `request` says whether to request it again."""

    watched: WatchedCompilation
    request: bool


class Stuck(NamedTuple):
    """The process that compiles has made no progress for `seconds`."""

    seconds: float


class CompileWatch:
    """The compilations that were requested from workers, by function and host."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, int], WatchedCompilation] = {}

    def requested(self, function: str, host: int, session: int, feed: int, now: float) -> None:
        """Watch a compilation that is requested from a worker now, for the first time or again."""
        before = self._watched.get((function, host))
        requests = 0 if before is None else before.requests
        self._watched[function, host] = WatchedCompilation(session, feed, now, requests=requests)

    def forget(self, hosts: Container[int]) -> None:
        """Forget the compilations on hosts that are lost."""
        for key in [key for key in self._watched if key[1] in hosts]:
            del self._watched[key]

    def questions(self, now: float, hosts: Container[int], awaited: Container[tuple[str, int]]) -> dict[int, list[str]]:
        """Return the functions to ask each of these hosts about. Forget compilations that are not `awaited`.

        If there are many, the ones that were asked about longest ago come first.
        """
        found: dict[int, list[str]] = {}
        for key, each in list(self._watched.items()):
            function, host = key
            if key not in awaited:
                del self._watched[key]
            elif each.is_requested and host in hosts and now - each.asked >= ASK_SECONDS:
                names = found.setdefault(host, [])
                if len(names) < MAX_ASKED:
                    names.append(function)
                    del self._watched[key]  # behind the others
                    self._watched[key] = msgspec.structs.replace(each, asked=now)
        return found

    def reported(self, host: int, report: m.CompileReport, now: float) -> Lost | Stuck | None:
        """Handle a worker's report. Return what is wrong with the compilation, or None."""
        key = report.function, host
        each = self._watched.get(key)
        if each is None or not each.is_requested:
            return None
        if report.stage is m.CompileStage.UNKNOWN:
            return self._unknown(key, msgspec.structs.replace(each, unknown=each.unknown + 1, report=report))
        is_still = report.progress != -1 and report == each.report
        each = msgspec.structs.replace(each, unknown=0, report=report, since=each.since if is_still else now)
        self._watched[key] = each
        is_stuck = report.stage is m.CompileStage.COMPILING and now - each.since > STUCK_SECONDS
        return Stuck(now - each.since) if is_stuck else None

    def _unknown(self, key: tuple[str, int], each: WatchedCompilation) -> Lost | None:
        if each.unknown < _UNKNOWN_REPORTS:
            self._watched[key] = each
            return None
        if each.requests >= MAX_REQUESTS:
            return Lost(each, request=False)
        self._watched[key] = msgspec.structs.replace(each, is_requested=False, requests=each.requests + 1)
        return Lost(each, request=True)

    def report_of(self, function: str, host: int) -> m.CompileReport | None:
        """Return the worker's last report on the compilation, or None if it has not been asked."""
        each = self._watched.get((function, host))
        return None if each is None else each.report
