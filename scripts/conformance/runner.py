"""Runs one test file to its end, in as many processes as that takes.

A test that crashes, hangs or exits must not take the file's other results with it. When a process is gone
before its time, the test that had begun and not ended is the culprit and gets its outcome, and a new process
runs the rest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from .attempt import Attempt, Listener, Order
from .environments import Environment
from .projects import TestFile
from .results import WHOLE, FileResults, Outcome, Sample, TestResult

MAX_PROCESSES = 40  # lost to one file before the rest of it is given up


def run_file(
    file: TestFile,
    environment: Environment,
    *,
    timeout: float,
    only: Collection[str] | None = None,
    keyword: str | None = None,
    sample: Sample = WHOLE,
    listener: Listener | None = None,
) -> FileResults:
    """Runs the tests of one file and returns a result for each of them.

    `timeout` is in seconds for each test. `only` restricts the run to these test ids, `keyword` to what
    pytest's -k selects, and `sample` to a part of these tests, unless `only` is given. Tests that could not be
    run have the outcome NOT_RUN; nothing that a test does is raised here.
    """
    began = time.monotonic()
    results: dict[str, TestResult] = {}
    troubles: list[str] = []
    selected: list[str] | None = None
    wanted = only
    processes = 0
    while True:
        processes += 1
        attempt = Attempt(Order(file, environment, timeout, wanted, keyword, sample), listener or Listener())
        with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
            attempt.run(Path(directory))
        results |= attempt.results
        selected = attempt.selected if selected is None else selected
        troubles += attempt.troubles()
        wanted = [test for test in selected or () if test not in results]
        if not wanted:
            break
        # A new process helps only if this one lost its way in a test; otherwise the next one would do the
        # same.
        if attempt.culprit is None or processes >= MAX_PROCESSES:
            troubles.append(f"given up after {processes} processes, with {len(wanted)} tests not run")
            results |= {test: TestResult(Outcome.NOT_RUN, troubles[-1]) for test in wanted}
            break
    return FileResults(
        {test: without_directories(result, file) for test, result in results.items()},
        round(time.monotonic() - began, 1),
        processes,
        troubles,
    )


def without_directories(result: TestResult, file: TestFile) -> TestResult:
    """The result with no directory of this machine in its message."""
    message = result.message
    for directory in (file.root, Path(os.__file__).parent, Path.home()):
        message = message.replace(f"{directory}/", "")
    return TestResult(result.outcome, message, result.seconds)
