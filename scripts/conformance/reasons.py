"""Why a test may pass on stock JAX and not on Atoll: a table kept by hand.

    [[reason]]
    why = "jaxlib's open-source IFRT proxy client refuses host callbacks"
    error = "Unsupported host callback type"     # part of the error's line, optional
    tests = ["api_test::JaxprTest::*"]           # shell patterns of test ids, optional

A reason applies to a difference if its test matches one of the patterns and its error holds the text; at
least one of the two must be given. The first one that applies counts.
"""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from .comparison import Difference, FileReport, explained


class ReasonError(Exception):
    """The table of reasons is not readable."""


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    why: str
    tests: tuple[str, ...] = ("*",)
    error: str = ""

    def applies(self, difference: Difference) -> bool:
        return self.error in difference.message and any(fnmatchcase(difference.test, pattern) for pattern in self.tests)


class ReasonTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: list[Reason] = []

    def explain(self, report: FileReport) -> FileReport:
        return explained(report, {difference.test: self.why(difference) for difference in report.differences})

    def why(self, difference: Difference) -> str | None:
        return next((reason.why for reason in self.reason if reason.applies(difference)), None)


def read(path: Path) -> ReasonTable:
    """The table at `path`, empty if there is no such file. Raises `ReasonError` if it is not understood."""
    try:
        table = msgspec.convert(tomllib.loads(path.read_text()), ReasonTable)
    except FileNotFoundError:
        return ReasonTable()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ReasonError(f"{path}: {error}") from error
    for reason in table.reason:
        if reason.tests == ("*",) and not reason.error:
            raise ReasonError(f"{path}: the reason {reason.why!r} would explain everything: give tests or error")
    return table
