"""Runs of executables of the server that this process and its proxy count, so that both know the number of each run."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol, TypeVar

from atoll.protocol.submission import MAX_READINGS, RUNS_OF_A_READING, first_feed

_MAX_EXECUTABLES = 256
# An array of a type that was written so often before is made by an executable, which costs round trips.
MIN_WRITTEN = 2
MAX_TYPES = 1024  # whose arrays are counted

Value = TypeVar("Value", contravariant=True)


class Expected(Protocol[Value]):
    """The values of the runs that have not ended, by number. Any thread may remove some."""

    def __setitem__(self, number: int, value: Value) -> None: ...

    def pop(self, number: int, default: None, /) -> Any:
        """Remove the value of a run, if it is there."""


class _Executable:
    """An executable whose runs have consecutive numbers."""

    def __init__(self, run: Callable[[list[Any]], Any], number: int) -> None:
        self.run = run
        first = first_feed(number)
        self.numbers: Iterator[int] = iter(range(first, first + RUNS_OF_A_READING))


class WrittenTypes:
    """Counts the arrays that were written, by type. Thread-safe: a lost count only delays an executable."""

    def __init__(self) -> None:
        self._written: dict[Hashable, int] = {}

    def is_frequent(self, key: Hashable) -> bool:
        """Count an array of this type. Return whether it was written `MIN_WRITTEN` times before."""
        written = self._written.get(key, 0)
        if written >= MIN_WRITTEN:
            return True
        if len(self._written) >= MAX_TYPES:
            self._written.clear()
        self._written[key] = written + 1
        return False

    def clear(self) -> None:
        """Forget all counts."""
        self._written.clear()


class NumberedRuns:
    """The executables, by key. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._executables: dict[Hashable, _Executable] = {}
        self._lock = threading.Lock()

    def run(
        self,
        key: Hashable,
        submit: Callable[[int], Callable[[list[Any]], Any]],
        arguments: list[Any],
        expected: Expected[Value],
        value: Value,
    ) -> tuple[int, Any]:
        """Run the executable of `key`. Return the number of the run, and jaxlib's results.

        Args:
          key: the executable.
          submit: Makes the executable with this number of an executable, and returns its `execute_sharded`.
          arguments: the arguments of the run.
          expected: gets the value of the run before the run is sent.
          value: the value of this run.

        Raises:
          JaxRuntimeError, ValueError: the server refuses the run, or `expected` the value, or no number is left.
        """
        number: int | None = None
        sent: list[Any] = []
        with self._lock:  # the server counts the runs of an executable in the order in which they are sent
            try:
                executable = self._executables.get(key)
                if executable is None:
                    executable = self._add(key, submit)
                number = next(executable.numbers, None)
                if number is None:
                    executable = self._add(key, submit)
                    number = next(executable.numbers)
                expected[number] = value
                sent.extend(map(executable.run, (arguments,)))  # C code, which no signal handler of Python interrupts
                return number, sent.pop()
            except BaseException:
                if sent:  # the server takes the value, though the script has no results
                    raise
                self._executables.pop(key, None)  # the server may have counted the run or not
                if number is not None:
                    expected.pop(number, None)  # another thread may have removed all values meanwhile
                raise

    def _add(self, key: Hashable, submit: Callable[[int], Callable[[list[Any]], Any]]) -> _Executable:
        number = next(self._numbers)
        if number >= MAX_READINGS:
            raise ValueError(f"this process has used all {MAX_READINGS} numbers of executables")
        executable = self._executables[key] = _Executable(submit(number), number)
        if len(self._executables) > _MAX_EXECUTABLES:
            del self._executables[next(iter(self._executables))]
        return executable

    def takes(self, key: Hashable) -> bool:
        """Return whether the executable of `key` exists, or is one more that replaces none."""
        return key in self._executables or len(self._executables) < _MAX_EXECUTABLES

    def forget_executables(self) -> None:
        """Forget the executables, because the client was closed."""
        with self._lock:
            self._executables.clear()
