"""A pytest plugin that writes one JSON line per event, so that a run that dies keeps what it had.

`conformance/runner.py` loads it with `-p conformance_plugin` and reads the lines while the tests run. Each
line is whole before the next test starts, therefore the last `start` without an `end` names the test that
took the process down. A test past its time is ended by faulthandler's own C thread: that works even while
native code holds the GIL, where a Python timer thread would wait for ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

EVENTS = "CONFORMANCE_EVENTS"  # file the lines are appended to
STACKS = "CONFORMANCE_STACKS"  # file for the stacks of a test that ran out of time or crashed
WANTED = "CONFORMANCE_WANTED"  # optional: JSON file with the list of node ids to run
EVERY = "CONFORMANCE_EVERY"  # optional, without WANTED: a number n, to run every n-th test that was collected
FIRST = "CONFORMANCE_FIRST"  # optional, with EVERY: the number of the first test to run, counted from 0
TIMEOUT = "CONFORMANCE_TIMEOUT"  # seconds a test may take, its set-up and tear-down included
FOREIGN = "CONFORMANCE_FOREIGN"  # optional: a source tree whose packages must not be imported
PACKAGES = "CONFORMANCE_PACKAGES"  # with FOREIGN: the packages under test, with commas between
LEFT_OUT = "CONFORMANCE_LEFT_OUT"  # optional, PACKAGE=DIRECTORY: where modules of a package are that its wheel lacks

MESSAGE_LIMIT = 400  # characters


def one_line(text: str) -> str:
    """The line of an exception's text that says most: the first one with more in it than its name."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    head = lines[0]
    if len(lines) > 1 and head.endswith(":") and " " not in head:
        head = f"{head} {lines[1]}"
    return head[:MESSAGE_LIMIT]


def error_text(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return one_line(crash.message)
    if isinstance(report.longrepr, tuple):  # a skip: (path, line, reason)
        return one_line(str(report.longrepr[2]).removeprefix("Skipped: "))
    lines = [line for line in str(report.longrepr or "").splitlines() if line.startswith("E ")]
    return one_line(lines[-1][1:] if lines else str(report.longrepr or ""))


class Recorder:
    """Folds the reports of one test into one outcome and appends it to the event file."""

    def __init__(self, events: IO[str], stacks: IO[str], timeout: float) -> None:
        self._events = events
        self._stacks = stacks
        self._timeout = timeout
        self._outcome = "passed"
        self._message = ""
        self._seconds = 0.0

    def _write(self, **event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if wanted_file := os.environ.get(WANTED):
            wanted = set(json.loads(Path(wanted_file).read_text()))
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
            items[:] = [item for item in items if item.nodeid in wanted]
        elif (every := int(os.environ.get(EVERY, "1"))) > 1:
            sample = items[int(os.environ.get(FIRST, "0")) :: every]
            config.hook.pytest_deselected(items=[item for item in items if item not in sample])
            items[:] = sample
        self._write(event="collected", ids=[item.nodeid for item in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(event="collect_error", message=error_text(report))
        elif report.skipped:
            self._write(event="collect_skip", message=error_text(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._message, self._seconds = "passed", "", 0.0
        self._write(event="start", id=nodeid)
        faulthandler.dump_traceback_later(self._timeout, exit=True, file=self._stacks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        subtest = hasattr(report, "context")  # a SubtestReport: the test itself reports after it
        if report.failed:
            # A failed set-up or tear-down is an error; the first failure is the one worth telling.
            if self._outcome not in ("failed", "error"):
                self._outcome = "failed" if report.when == "call" else "error"
                self._message = error_text(report)
        elif hasattr(report, "wasxfail"):
            self._outcome = "xfailed" if report.skipped else "xpassed"
        elif report.skipped and not subtest and self._outcome == "passed":
            self._outcome, self._message = "skipped", error_text(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        seconds = round(self._seconds, 3)
        self._write(event="end", id=nodeid, outcome=self._outcome, message=self._message, seconds=seconds)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(event="finished", status=int(exitstatus))


class LeftOutFinder(importlib.abc.MetaPathFinder):
    """Finds the modules below `package` that its wheel lacks in a checkout's `directory`: it is asked last."""

    def __init__(self, package: str, directory: Path) -> None:
        self._package = package
        self._directory = directory

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{self._package}."):
            return None
        inner = fullname.removeprefix(f"{self._package}.").split(".")[:-1]
        spec = importlib.machinery.PathFinder.find_spec(fullname, [str(self._directory.joinpath(*inner))], target)
        return spec if spec is not None and spec.origin is not None else None  # a mere directory is no module


def pytest_configure(config: pytest.Config) -> None:
    foreign = os.environ.get(FOREIGN)
    for package in os.environ[PACKAGES].split(",") if foreign else ():
        spec = importlib.util.find_spec(package)
        origin = spec.origin if spec is not None else None
        if foreign and origin and Path(origin).resolve().is_relative_to(Path(foreign).resolve()):
            raise pytest.UsageError(f"{package} would be imported from the checkout ({origin}), not as installed")
    package, _, directory = os.environ.get(LEFT_OUT, "").partition("=")
    if package:
        sys.meta_path.append(LeftOutFinder(package, Path(directory)))
    with contextlib.suppress(ImportError):  # as absl's own runner does before it makes temporary directories
        importlib.import_module("absl.flags").FLAGS.mark_as_parsed()
    # Both stay open until the process ends: faulthandler writes to the one, the last event goes to the other.
    stacks = open(os.environ[STACKS], "w")  # noqa: SIM115
    events = open(os.environ[EVENTS], "a")  # noqa: SIM115
    faulthandler.enable(file=stacks)
    recorder = Recorder(events, stacks, float(os.environ[TIMEOUT]))
    config.pluginmanager.register(recorder, "conformance-recorder")
