"""The CPU time of the suite by file, test and kind of process: `make test ARGS=--cpu`."""

from __future__ import annotations

import os
import resource
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.forked_process import FORKING

# File in which processes record the CPU time of tests and of their child processes. It is unset without `--cpu`.
_RECORDS = "ATOLL_TEST_CPU_TIMES"
_COLLECTION = "collection"
_SERVER = "server that forks processes"
_SHOWN = 0.05  # seconds


def seconds() -> float:
    """Return the user and system CPU time of this process and of its children that have ended."""
    return sum(_of(resource.getrusage(who)) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _of(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def _record(took: float, test: str, kind: str = "") -> None:
    if path := os.environ.get(_RECORDS):
        with Path(path).open("a") as file:  # a single write, so that the lines of processes are not mixed
            file.write(f"{took}\t{test}\t{kind}\n")


def record_forked(used: resource.struct_rusage, environment: Mapping[str, str], kind: str) -> None:
    """Record the CPU time of a forked process that has ended, with that of its children.

    The fork server waits for the process, and so counts this time as its own.
    """
    _record(_of(used), _test(environment), kind)
    _record(-_of(used), _SERVER)


def end_server() -> None:
    """End the fork server of this process. It counts as a separate kind, and not for the test at whose end it ends."""
    before = seconds()
    FORKING.end()
    took = seconds() - before
    _record(took, _SERVER)
    if test := _test(os.environ):
        _record(-took, test)


def _test(environment: Mapping[str, str]) -> str:
    return environment.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


class CpuTime:
    """Plugin that sums up the CPU time of tests, and prints tables at the end of the run.

    An executed process counts for the test that waits for its end. A forked process counts for the test that started
    it.
    """

    def __init__(self) -> None:
        handle, path = tempfile.mkstemp()
        os.close(handle)
        os.environ[_RECORDS] = path

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            _record(seconds(), _COLLECTION)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = seconds()
        try:
            return (yield)
        finally:
            _record(seconds() - before, item.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        tests, files, kinds, counts = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        path = Path(os.environ.pop(_RECORDS))
        for line in path.read_text().splitlines():
            took, test, kind = line.split("\t")
            tests[test] += float(took)
            files[test.partition("::")[0]] += float(took)
            if kind:
                kinds[kind] += float(took)
                counts[kind] += 1
        path.unlink()
        all_kinds = Counter({f"{counts[kind]} x {kind}": took for kind, took in kinds.items()})
        for title, times in (("file", files), ("test", tests), ("kind of forked process", all_kinds)):
            terminalreporter.section(f"CPU seconds by {title}")
            for name, took in times.most_common():
                if took >= _SHOWN:
                    terminalreporter.write_line(f"{took:8.1f} {name}")
        terminalreporter.write_line(f"{tests.total():8.1f} in all")
