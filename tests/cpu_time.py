"""The CPU time of the suite by file: `make test ARGS=--cpu`."""

from __future__ import annotations

import os
import resource
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# The file in which fork servers record the processes that they have reaped; unset if nobody measures.
_RECORDS = "ATOLL_TEST_CPU_TIMES"
_SERVERS = "servers that fork processes"


def seconds() -> float:
    """Return the CPU time of this process and of its children that have ended, user and system."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def record(test: str, kind: str, used: resource.struct_rusage) -> None:
    """Record the CPU time of a process that was forked for `test`, with that of its children."""
    if path := os.environ.get(_RECORDS):
        with Path(path).open("a") as file:  # one write, so that servers do not mix their lines
            file.write(f"{used.ru_utime + used.ru_stime}\t{kind}\t{test}\n")


class CpuTime:
    """Adds up what each file's tests take, and prints tables at the end of the run.

    A process that was executed counts for the test that waits for its end. A process that was forked counts for the
    test that started it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: Counter[str] = Counter()
        self._forked: Counter[str] = Counter()
        if not hasattr(config, "workerinput"):
            handle, path = tempfile.mkstemp()
            os.close(handle)
            os.environ[_RECORDS] = path

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = seconds()
        try:
            return (yield)
        finally:
            self._tests[item.nodeid] += seconds() - before

    def server_ended(self, test: str, used: float) -> None:
        """Take the CPU time of a fork server, with all that it has forked, from the test during which it ended."""
        self._tests[test] -= used
        self._tests[_SERVERS] += used

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        output = getattr(self._config, "workeroutput", None)  # in a process of pytest-xdist
        if output is not None:
            output["cpu_time"] = dict(self._tests)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._tests.update(getattr(node, "workeroutput", {}).get("cpu_time", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if hasattr(self._config, "workerinput"):
            return
        path = Path(os.environ.pop(_RECORDS))
        for line in path.read_text().splitlines():
            took, kind, test = line.split("\t")
            self._tests[test.rpartition(" ")[0]] += float(took)
            self._tests[_SERVERS] -= float(took)
            self._forked[kind] += float(took)
        path.unlink()
        files: Counter[str] = Counter()
        for test, used in self._tests.items():
            files[test.partition("::")[0]] += used
        for title, times in (("file", files), ("test", self._tests), ("kind of forked process", self._forked)):
            terminalreporter.section(f"CPU seconds by {title}")
            for name, used in times.most_common():
                if used >= 0.05:
                    terminalreporter.write_line(f"{used:8.1f} {name}")
