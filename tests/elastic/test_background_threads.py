"""Tests that background work of a training ends before its process does."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time

from atoll.elastic import background_threads


def work():
    time.sleep(0.5)
    print("over")


background_threads.start("work", work)
"""


def test_a_script_that_ends_waits_for_what_is_under_way() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout == "over\n"
