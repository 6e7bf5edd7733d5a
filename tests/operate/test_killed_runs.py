"""Test that a killed test run leaves no cluster, although it could not end the cluster itself."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path

from tests.cluster_process import eventually
from tests.lines import next_line
from tests.process_environments import processes_with
from tests.scripts import start_process

ROOT = Path(__file__).resolve().parent.parent.parent
STARTS_A_CLUSTER = """
def test_a_cluster(user):
    import time
    user.atoll("up", "--islands", "1x1x1", "--platform", "null").check()
    print("up in", user.runtime, flush=True)
    time.sleep(300)
"""


def test_a_run_that_is_killed_leaves_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(STARTS_A_CLUSTER)
    mark = uuid.uuid4().hex
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-c",
        os.devnull,
        "-p",
        "tests.conftest",
        str(tmp_path / "test_it.py"),
    ]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = start_process(pytest, os.environ | {"PYTHONPATH": paths, "ATOLL_MARK_OF_A_TEST": mark}, tmp_path)
    output = []
    while "up in " not in (line := next_line(run)):
        output.append(line)
        assert line, f"{''.join(output)}\n{run.stderr.read() if run.stderr else ''}"
    runtime = Path(line.rpartition("up in ")[2].strip())
    assert any(
        "atoll.controller_process.controller_main" in each.cmdline()
        for each in processes_with("ATOLL_MARK_OF_A_TEST", mark)
    )
    assert runtime.exists()
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert eventually(lambda: processes_with("ATOLL_MARK_OF_A_TEST", mark) == [])
    assert eventually(lambda: not runtime.exists())
