"""The outcome of each test of a file, on one runtime."""

from __future__ import annotations

import enum
from collections import Counter

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """The tests of a file to run: number `first`, counted from 0, and every `every`-th test after it."""

    every: int = 1
    first: int = 0


WHOLE = Sample()


class Outcome(enum.StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"  # in its set-up or tear-down
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    CRASHED = "crashed"  # took the process down
    TIMEOUT = "timeout"
    NOT_RUN = "not run"  # the file was given up before its turn came
    ABSENT = "absent"  # not among the tests that the file has on this runtime


class TestResult(msgspec.Struct, frozen=True):
    __test__ = False  # a record, not a test case

    outcome: Outcome
    message: str = ""  # one line of the error, or the reason of a skip
    seconds: float = 0.0


class FileResults(msgspec.Struct, frozen=True):
    """All results of one file.

    `tests` maps `file::Class::test` to its result. `troubles` are one-line accounts of what went wrong
    outside any test: the file could not be imported, the process crashed or hung at exit.
    """

    tests: dict[str, TestResult]
    seconds: float  # wall time, restarts included
    processes: int  # more than one when tests took the process down
    troubles: list[str] = []

    @property
    def passed(self) -> set[str]:
        return {name for name, result in self.tests.items() if result.outcome is Outcome.PASSED}

    def counts(self) -> dict[str, int]:
        return dict(Counter(str(result.outcome) for result in self.tests.values()))
