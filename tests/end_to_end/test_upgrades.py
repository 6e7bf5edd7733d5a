"""Test of upgrades: the controller of a running cluster is killed after another version of Atoll was installed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import atoll
from tests.cluster_process import User, eventually, finish

STEPS = """
    import time
    import jax
    x, f = jax.numpy.zeros(()), jax.jit(lambda x: x + 1)
    print("steps", flush=True)
    for _ in range(2000):
        x = f(x)
        float(x)
        time.sleep(0.05)
"""


def write(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)


@pytest.mark.thorough
def test_the_same_protocol_continues_and_another_one_ends_with_the_reason(user: User, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(Path(atoll.__file__).parent, source / "atoll")
    user.env |= {"PYTHONPATH": str(source), "ATOLL_STATE_DIR": str(tmp_path / "state"), "ATOLL_TEST_EXECUTED": "1"}
    address = user.atoll("up", "--islands", "1x1x1", "--journal", str(tmp_path / "j")).check().stdout.strip()
    script = user.start(sys.executable, "-c", dedent(STEPS), ATOLL_ADDRESS=address, JAX_PLATFORMS="atoll")
    assert script.stdout is not None
    script.stdout.readline()
    write(source / "atoll" / "_version.py", r"^__version__ = .*$", '__version__ = "99.0"')
    user.process("atoll.controller_process.controller_main").kill()
    assert eventually(lambda: "atoll 99.0" in user.atoll("status").stdout)
    assert script.poll() is None
    write(source / "atoll" / "protocol" / "messages" / "opening_messages.py", r"^PROTOCOL = .*$", "PROTOCOL = 1")
    user.process("atoll.controller_process.controller_main").kill()
    error = finish(script).stderr
    assert "the cluster has ended: the controller cannot run: " in error
    assert "this is atoll 99.0 (protocol 1)" in error
    assert eventually(lambda: "this is atoll 99.0 (protocol 1)" in user.atoll("status").stderr)
    log = user.atoll("logs").check().stdout
    assert log.count("only a version with protocol") <= 3, "it is refused once"
