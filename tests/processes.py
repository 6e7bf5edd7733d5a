"""Several processes run the tests: `pytest --processes 3`.

One process collects the tests, which takes 20 s of CPU time in a fresh checkout, and forks the others. A process runs
one file after another, so that the tests of a file share their fixtures. Files with tests that have the marker
`together` with the same name run in one process, so that they also share what lives as long as a process: fixtures of
the session, such as a cluster, and caches. All processes share one fork server.

Tests that start clusters often wait, and others compute all the time. One process therefore begins with the files that
compute, and the others begin with those that wait, so that the cores are busy from the start to the end of a run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

from tests import cpu_time

_END_SECONDS = 120.0  # for the fixtures of a process that is interrupted
_WAITING = ("cluster", "slow")  # markers of tests that wait for other processes

Message = tuple[str, Any]


@dataclass
class _Process:
    """A process that runs tests, as the process that has forked it knows it."""

    pid: int
    connection: Connection[Any, Any]
    computes: bool  # whether it begins with the files that compute
    waiting: list[int] = field(default_factory=list)  # the numbers of its tests that have not begun
    current: int | None = None


def _divided(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Return the numbers of tests, divided into those that run in one process: of a file, or of files together."""
    names = {item.path: marker.args for item in items if (marker := item.get_closest_marker("together")) is not None}
    found: dict[Any, list[int]] = {}
    for number, item in enumerate(items):
        found.setdefault(names.get(item.path, item.path), []).append(number)
    return list(found.values())


def _waits(items: Sequence[pytest.Item]) -> bool:
    """Return whether tests of a file wait for other processes."""
    return any(item.get_closest_marker(name) for item in items for name in _WAITING)


class Processes:
    """Distributes the files of tests among processes.

    `prepare` is called before the first of them is forked, and `begin` at the start of each.
    """

    def __init__(self, config: pytest.Config, prepare: Callable[[], Any], begin: Callable[[], None]) -> None:
        self._config = config
        self._prepare = prepare
        self._begin = begin
        self._files: dict[bool, list[list[int]]] = {}  # by whether they compute
        self._running: dict[Connection[Any, Any], _Process] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or self._config.option.collectonly or not session.items:
            return None
        assert not self._config.option.basetemp, "--basetemp needs one process: run without --processes"
        assert len(os.listdir("/proc/self/task")) == 1, "a module starts a thread when it is imported"
        files = _divided(session.items)
        waits = [_waits([session.items[number] for number in file]) for file in files]
        self._files = {
            computes: [file for file, its in zip(files, waits, strict=True) if its != computes]
            for computes in (True, False)
        }
        self._prepare()
        try:
            for number in range(min(self._config.getoption("--processes"), len(files))):
                self._fork(session, computes=number == 0)
            while self._running:
                for connection in wait(list(self._running)):
                    assert isinstance(connection, Connection)
                    self._handle(session, self._running[connection])
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            self._end()
            cpu_time.end_server()
        return True

    # ---- in the process that has collected the tests

    def _fork(self, session: pytest.Session, computes: bool) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                for each in (ours, *self._running):
                    each.close()
                self._begin()
                _Runner(session, theirs).run()
            except BaseException:
                theirs.send(("bug", traceback.format_exc()))
            finally:
                os._exit(0)
        theirs.close()
        self._running[ours] = _Process(pid, ours, computes)

    def _following(self, computes: bool) -> list[int]:
        """Take the next file of a process, and return the numbers of its tests: none if no file is left."""
        for files in (self._files[computes], self._files[not computes]):
            if files:
                return files.pop(0)
        return []

    def _handle(self, session: pytest.Session, process: _Process) -> None:
        hook = self._config.hook
        try:
            kind, value = process.connection.recv()
        except (EOFError, OSError):
            self._ended(session, process)
            return
        match kind:
            case "next":
                file = self._following(process.computes)
                process.waiting += file
                process.connection.send(file)
            case "start":
                process.current = value
                process.waiting.remove(value)
                item = session.items[value]
                hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            case "report":
                report = hook.pytest_report_from_serializable(config=self._config, data=value)
                hook.pytest_runtest_logreport(report=report)
            case "bug":
                raise AssertionError(value)
            case "finish":
                process.current = None
                item = session.items[value]
                hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, session: pytest.Session, process: _Process) -> None:
        """Report the test that has ended its process, and have another process run those that are left."""
        del self._running[process.connection]
        process.connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if process.current is None and not process.waiting:
            assert status == 0, f"a process ended with status {status} after its last test"
            return
        number = process.waiting.pop(0) if process.current is None else process.current
        item = session.items[number]
        text = f"the process that ran this test ended with status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        if process.waiting:
            self._files[process.computes].insert(0, process.waiting)
        if any(self._files.values()):
            self._fork(session, process.computes)

    def _end(self) -> None:
        """Interrupt all processes that run, and wait for their ends."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + _END_SECONDS
        while self._running:
            for connection in wait(list(self._running), max(0.0, deadline - time.monotonic())):
                assert isinstance(connection, Connection)
                try:
                    connection.recv()
                except (EOFError, OSError):
                    os.waitpid(self._running.pop(connection).pid, 0)
            if time.monotonic() > deadline:
                for process in self._running.values():
                    os.kill(process.pid, signal.SIGKILL)


class _Runner:
    """Runs tests in a forked process, and reports to the process that has collected them."""

    def __init__(self, session: pytest.Session, connection: Connection[Any, Any]) -> None:
        self._session = session
        self._connection = connection
        self._config = session.config

    def run(self) -> None:
        manager = self._config.pluginmanager
        capture = manager.getplugin("capturemanager")
        if capture is not None:  # its files are those of the other processes
            capture.stop_global_capturing()
            capture.start_global_capturing()
        terminal = manager.getplugin("terminalreporter")
        manager.unregister(terminal)
        with open(os.devnull, "w") as nowhere:
            silent = type(terminal)(self._config, nowhere)
            manager.register(silent, "terminalreporter")
            silent.pytest_sessionstart(self._session)
            manager.register(self)
            try:
                self._run_files()
            except (KeyboardInterrupt, pytest.exit.Exception):
                self._session._setupstate.teardown_exact(None)
            atexit._run_exitfuncs()

    def _run_files(self) -> None:
        item = None
        while numbers := self._next():
            for number, following in zip(numbers, [*numbers[1:], None], strict=True):
                item = self._session.items[number]
                # Fixtures of the session stay for the next file.
                after: Any = self._session if following is None else self._session.items[following]
                self._connection.send(("start", number))
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                self._connection.send(("finish", number))
        if item is not None:
            end = partial(self._session._setupstate.teardown_exact, None)
            call = pytest.CallInfo.from_call(end, "teardown")
            report = self._config.hook.pytest_runtest_makereport(item=item, call=call)
            if report.failed:
                self.pytest_runtest_logreport(report)

    def _next(self) -> list[int]:
        self._connection.send(("next", None))
        numbers: list[int] = self._connection.recv()
        return numbers

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))
