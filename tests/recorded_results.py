"""Results of long tests, for tables in docs/."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from benchmarks.fault_runs import FaultRun

RESULTS = os.environ.get("ATOLL_TEST_RESULTS", "")


def record(run: FaultRun) -> None:
    """Print a result, and append it to the file that `ATOLL_TEST_RESULTS` names."""
    line = msgspec.json.encode(run)
    print(line.decode())
    if RESULTS:
        with Path(RESULTS).open("ab") as file:
            file.write(line + b"\n")
