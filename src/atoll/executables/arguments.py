"""Whether the arrays of a run are those that its executable takes."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import invalid
from atoll.executables.program_checks import describe, fits
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.types import ArraySpec


class Arguments:
    """What an executable takes; `what` names it in errors."""

    def __init__(self, what: str, expected: Sequence[ArraySpec]) -> None:
        self._what = what
        self._expected = tuple(expected)
        self._fitting = list(expected)  # by argument, the last that fitted

    def check(self, records: Sequence[ArrayRecord]) -> None:
        """Raises INVALID_ARGUMENT where one is missing or does not fit."""
        if len(records) != len(self._expected):
            raise invalid(f"{self._what} takes {len(self._expected)} arguments, got {len(records)}")
        for i, record in enumerate(records):
            if record.spec is not self._fitting[i]:
                if record.spec is None or not fits(record.spec, self._expected[i]):
                    given = "nothing" if record.spec is None else describe(record.spec)
                    raise invalid(f"{self._what} takes {describe(self._expected[i])} as argument {i}, got {given}")
                self._fitting[i] = record.spec
