"""The CPU time of the suite by file: `make test ARGS=--cpu`."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest


def seconds() -> float:
    """Return the CPU time of this process and of its children that have ended, user and system."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class CpuTime:
    """Adds up what each file's tests take, and prints a table at the end of the run.

    A process counts for the file whose test waits for its end. Those of the fork server, which several files share,
    are not in the table.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._files: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = seconds()
        try:
            return (yield)
        finally:
            self._files[item.nodeid.partition("::")[0]] += seconds() - before

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        output = getattr(self._config, "workeroutput", None)  # in a process of pytest-xdist
        if output is not None:
            output["cpu_time"] = dict(self._files)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._files.update(getattr(node, "workeroutput", {}).get("cpu_time", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("CPU seconds by file")
        for file, took in self._files.most_common():
            terminalreporter.write_line(f"{took:8.1f} {file}")
