"""An isolated process sees nothing of others. Each test is a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, sys
from pathlib import Path
from atoll.cluster.processes.isolation import isolate
base = Path(sys.argv[1])
own = base / "cluster" / "session-1" / "host-0"
own.mkdir(parents=True)
(own.parent / "shared").write_text("of the session")
(base / "cluster" / "secret").write_text("of the cluster")
isolated = isolate(own, own.parent, 1 << 30, [base / "cluster"])
if not isolated:
    print("no namespaces")
    sys.exit(0)
"""


def run(folder: Path, code: str) -> str:
    ended = subprocess.run([sys.executable, "-c", PRELUDE + code, str(folder)], capture_output=True, text=True)
    if "no namespaces" in ended.stdout:
        pytest.skip("this system allows no namespaces")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_it_sees_its_own_folders_and_no_others(tmp_path: Path):
    code = "print(sorted(os.listdir(base / 'cluster')), sorted(os.listdir(own.parent)), os.listdir(own))"
    assert run(tmp_path, code) == "['session-1'] ['host-0', 'shared'] []"


def test_what_it_writes_to_its_folder_is_seen_by_nobody_else(tmp_path: Path):
    run(tmp_path, "(own / 'note').write_text('mine')")
    assert list((tmp_path / "cluster" / "session-1" / "host-0").iterdir()) == []


def test_it_can_name_no_process_but_its_own(tmp_path: Path):
    code = "print([name for name in os.listdir('/proc') if name.isdigit()], os.getpid())"
    assert run(tmp_path, code) == "['1'] 1"


def test_it_has_no_privileges_and_gains_none(tmp_path: Path):
    code = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))])"
    assert run(tmp_path, code) == "['0000000000000000', '1']"


def test_memory_beyond_its_limit_is_an_error_in_it(tmp_path: Path):
    code = """
try:
    bytearray(2 << 30)
except MemoryError:
    print("refused")
"""
    assert run(tmp_path, code) == "refused"


def test_it_ends_as_its_code_ends(tmp_path: Path):
    ended = subprocess.run([sys.executable, "-c", PRELUDE + "os._exit(7)", str(tmp_path)])
    assert ended.returncode in (0, 7)
