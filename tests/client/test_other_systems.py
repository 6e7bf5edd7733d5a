"""Test that a script on a system without pidfds and memfds, such as macOS, can use a remote cluster.

The functions are removed from every Python process of the script.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cluster_process import User, free_port

pytestmark = pytest.mark.slow
SITE = """
import os, signal

for module, name in ((os, "pidfd_open"), (os, "memfd_create"), (signal, "pidfd_send_signal")):
    if hasattr(module, name):
        delattr(module, name)
"""
SCRIPT = """
import os

assert not hasattr(os, "pidfd_open") and not hasattr(os, "memfd_create")
import sys

import jax
import numpy as np

import atoll

with atoll.connect(join=sys.argv[1]) as devices:
    x = jax.device_put(np.arange(1 << 20, dtype=np.float32), devices[1])
    total = jax.jit(lambda x: x.sum())(x)
    print(len(devices), float(total) == np.arange(1 << 20, dtype=np.float32).sum(), int(np.asarray(x)[-1]))
"""


def test_a_script_without_pidfds_and_memfds_uses_a_remote_cluster(user: User, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    join = tmp_path / "join"
    address = ("--listen", f"127.0.0.1:{free_port()}", "--join-file", str(join))
    user.atoll("up", "--islands", "1x1x2", *address).check()
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2] / "src")))
    with User(user.runtime / "script", user.runtime / "cache", PYTHONPATH=path, JAX_PLATFORMS="cpu") as other:
        other.runtime.mkdir(mode=0o700)
        process = other.start(sys.executable, str(script), str(join))
        output, errors = process.communicate(timeout=300)
    assert output.split() == ["2", "True", "1048575"], errors
    user.atoll("down").check()
