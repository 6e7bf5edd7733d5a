"""Bugs that tests inject into processes of a cluster.

A process with the variables of `environment(...)` imports `sitecustomize` from this directory when Python starts, so
that Atoll needs no hooks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "ATOLL_TEST_FAULTS"


def environment(faults: dict[str, str], base: dict[str, str] | None = None) -> dict[str, str]:
    """Return an environment that replaces each function of `faults`, for example
    `"atoll.worker.completion_reporter:CompletionReporter.watch"`.

    Each value names a function of `tests/faults/sitecustomize.py`, which takes the original function and returns its
    replacement. Text after a colon is a second argument.
    """
    base = dict(os.environ if base is None else base)
    paths = [str(Path(__file__).parent), *filter(None, [base.get("PYTHONPATH")])]
    return base | {VARIABLE: json.dumps(faults), "PYTHONPATH": os.pathsep.join(paths)}
