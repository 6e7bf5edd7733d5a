"""One pytest process: starts it, follows its events, and says how it ended.

The plugin appends an event to a file before and after each test. Silence longer than any test may take ends
the process from here; the plugin's own clock comes first and leaves the stacks of the test that is late.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .. import conformance_plugin as plugin
from .environments import Environment
from .projects import TestFile
from .results import WHOLE, Outcome, Sample, TestResult

COLLECT_SECONDS = 300.0  # importing JAX, starting a cluster, making the test cases
EXIT_SECONDS = 60.0  # from the last test to the process's end
GRACE_SECONDS = 30.0  # on top of a test's own time before its process is ended from outside
KILL_SECONDS = 5.0  # between asking a process group to end and ending it
POLL_SECONDS = 0.1
EXPECTED_CODES = (0, 1, 5)  # pytest's: all passed, some failed, none selected


class Listener:
    """Listener for the events of a running file. The base class ignores them."""

    def collected(self, tests: int) -> None:
        """A process has found that many tests to run."""

    def ended(self, test: str, result: TestResult) -> None:
        """A test has its result."""


@dataclass(frozen=True)
class Order:
    """Work of one process."""

    file: TestFile
    environment: Environment
    timeout: float  # seconds for each test
    wanted: Collection[str] | None = None  # test ids; None means all
    keyword: str | None = None
    sample: Sample = WHOLE  # of the tests that `keyword` leaves; not with `wanted`

    def command(self) -> list[str]:
        # -s: what native code says before it dies must reach the log; pytest's capture would swallow it.
        # importlib mode keeps the checkout off sys.path: its jax directory must not hide the installed one.
        flags = ["-q", "-s", "--no-header", "--tb=short", "--import-mode=importlib"]
        flags += [] if self.file.conftest else ["--noconftest"]
        places = ["-c", str(self.file.config), "--rootdir", str(self.file.root)]
        own = plugin.__name__.rpartition(".")[2]
        plugins = [f"-p{own}", "-pno:cacheprovider", "-pno:faulthandler"]
        keyword = ["-k", self.keyword] if self.keyword else []
        return [sys.executable, "-m", "pytest", *flags, *places, *plugins, *keyword, str(self.file.path)]

    def variables(self, directory: Path) -> dict[str, str]:
        python_path = [str(Path(plugin.__file__).parent), os.environ.get("PYTHONPATH", "")]
        variables = self.environment.variables() | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
            plugin.EVENTS: str(directory / "events"),
            plugin.STACKS: str(directory / "stacks"),
            plugin.TIMEOUT: str(self.timeout),
        }
        if self.file.foreign is not None:
            variables[plugin.FOREIGN] = str(self.file.foreign)
            variables[plugin.PACKAGES] = ",".join(self.file.packages)
        if self.file.left_out is not None:
            variables[plugin.LEFT_OUT] = "=".join(map(str, self.file.left_out))
        if self.sample.every > 1:
            variables |= {plugin.EVERY: str(self.sample.every), plugin.FIRST: str(self.sample.first)}
        if self.wanted is not None:
            (directory / "wanted").write_text(json.dumps([self.node(test) for test in self.wanted]))
            variables[plugin.WANTED] = str(directory / "wanted")
        return variables

    def node(self, test: str) -> str:
        """pytest's node id of a test."""
        return f"{self.file.path.relative_to(self.file.root)}::{test.partition('::')[2]}"

    def test(self, node: str) -> str:
        return f"{self.file.name}::{node.partition('::')[2]}"


@dataclass
class Attempt:
    """The life of one process and what became known in it."""

    order: Order
    listener: Listener
    selected: list[str] | None = None  # test ids, once the file is collected
    results: dict[str, TestResult] = field(default_factory=dict)
    running: str | None = None
    culprit: str | None = None  # the test in which the process ended
    refusal: str = ""  # why the file as a whole could not be collected, or was skipped
    finished: bool = False  # pytest came to the end of its session
    overdue: bool = False  # ended by the clock in here
    returncode: int = 0
    last_words: str = ""

    def run(self, directory: Path) -> None:
        """Runs the process to its end. `directory` is an empty one, for its files."""
        events, work = directory / "events", directory / "work"
        events.touch()
        work.mkdir()
        with (directory / "output").open("wb") as output, events.open() as lines:
            # A new process group, so that it can be killed with all processes that the tests have started.
            process = subprocess.Popen(
                self.order.command(),
                cwd=work,  # an empty directory: `python -m` puts it on sys.path
                env=self.order.variables(directory),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._follow(process, lines)
            finally:
                end_group(process)
        self.returncode = process.returncode
        stacks = read_lines(directory / "stacks")
        self.overdue = self.overdue or bool(stacks and stacks[0].startswith("Timeout"))
        self.last_words = last_words(stacks, read_lines(directory / "output"), late=self.overdue)
        if self.running is not None:
            self.culprit, self.running = self.running, None
            self._end(self.culprit, self._verdict())

    def troubles(self) -> list[str]:
        """Return the problems outside of tests."""
        if self.refusal:
            return [self.refusal]
        good_end = self.finished and not self.overdue and self.returncode in EXPECTED_CODES
        return [] if good_end or self.culprit is not None else [self._ending()]

    def _follow(self, process: subprocess.Popen[bytes], lines: TextIO) -> None:
        heard = time.monotonic()
        while True:
            ended = process.poll() is not None  # asked before reading: what it wrote last is read below
            for event in new_events(lines):
                heard = time.monotonic()
                self._take(event)
            if ended:
                return
            if time.monotonic() - heard > self._patience():
                self.overdue = True
                return
            time.sleep(POLL_SECONDS)

    def _patience(self) -> float:
        """For how many seconds the process may be silent now."""
        if self.finished:
            return EXIT_SECONDS
        return COLLECT_SECONDS if self.selected is None else self.order.timeout + GRACE_SECONDS

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "collected":
                self.selected = [self.order.test(node) for node in event["ids"]]
                self.listener.collected(len(self.selected))
            case "collect_error":
                self.refusal = f"the file could not be collected: {event['message']}"
            case "collect_skip":
                self.refusal = f"the file was skipped: {event['message']}"
            case "start":
                self.running = self.order.test(event["id"])
            case "end":
                self.running = None
                result = TestResult(Outcome(event["outcome"]), event["message"], event["seconds"])
                self._end(self.order.test(event["id"]), result)
            case "finished":
                self.finished = True

    def _end(self, test: str, result: TestResult) -> None:
        self.results[test] = result
        self.listener.ended(test, result)

    def _verdict(self) -> TestResult:
        if not self.overdue:
            return TestResult(Outcome.CRASHED, self._ending())
        limit = self.order.timeout
        place = f", in {self.last_words}" if self.last_words else ""
        return TestResult(Outcome.TIMEOUT, f"no end within {limit:g} s{place}", limit)

    def _ending(self) -> str:
        if self.overdue:
            return "the process hung at its exit" if self.finished else "the process hung outside any test"
        code = self.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        when = " at its exit" if self.finished else ""
        return f"the process ended{when} with {how}" + (f": {self.last_words}" if self.last_words else "")


def new_events(lines: TextIO) -> Iterator[dict[str, Any]]:
    """The events written since the last call; a line that is not whole yet stays for the next one."""
    while True:
        place = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(place)
            return
        yield json.loads(line)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all it started: by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            deadline = time.monotonic() + KILL_SECONDS
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)  # raises once nobody is left
                time.sleep(POLL_SECONDS)
    process.wait()


def read_lines(path: Path) -> list[str]:
    """The lines of a file that say something; none if there is no such file."""
    if not path.exists():
        return []
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]


def last_words(stacks: list[str], output: list[str], *, late: bool) -> str:
    """Return the line that shows best where a process ended.

    For a process that was `late`, this is the innermost frame of its main thread, which faulthandler prints last. For
    one that died, it is the native check that failed, the signal, or the last line of its output.
    """
    if late:
        threads = [number for number, line in enumerate(stacks) if "most recent call first" in line]
        return plugin.one_line(stacks[threads[-1] + 1]) if threads and threads[-1] + 1 < len(stacks) else ""
    checks = [line for line in output if "Check failed" in line or line.startswith("F0")]
    return plugin.one_line((checks[-1:] or stacks[:1] or output[-1:] or [""])[0])
