"""Test that a script on a system that is not Linux, such as macOS, can use a remote cluster.

The functions and constants that only Linux has are removed from each Python process of the script, and /proc is hidden.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cluster_process import User, free_port

pytestmark = [pytest.mark.slow, pytest.mark.executed]
SITE = """
import builtins, errno, fcntl, io, mmap, os, resource, select, signal, socket, time

OF_LINUX = {
    os: "pidfd_open memfd_create eventfd eventfd_read eventfd_write splice copy_file_range unshare setns pipe2 "
    "posix_fadvise posix_fallocate sched_setscheduler sched_getscheduler sched_setaffinity sched_getaffinity O_PATH "
    "O_TMPFILE SCHED_BATCH getrandom",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "SO_PEERCRED TCP_USER_TIMEOUT TCP_INFO SOCK_NONBLOCK SOCK_CLOEXEC AF_NETLINK SO_DOMAIN SO_PROTOCOL",
    # Those to check the memory of the worker remain, because the worker is on this machine.
    fcntl: "F_SEAL_GROW F_SEAL_SEAL F_ADD_SEALS F_SETPIPE_SZ F_GETPIPE_SZ",
    mmap: "MADV_HUGEPAGE MADV_DONTFORK MADV_DONTDUMP MAP_POPULATE",
    resource: "prlimit",
    select: "epoll",
    time: "CLOCK_BOOTTIME",
}
os.process_cpu_count = os.cpu_count  # of Python 3.13, which calls `sched_getaffinity` if it is there at the start
for module, names in OF_LINUX.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def hiding(function):
    def call(path, *arguments, **options):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        return function(path, *arguments, **options)
    return call

for name in ("stat", "lstat", "listdir", "scandir", "readlink", "open"):
    setattr(os, name, hiding(getattr(os, name)))
builtins.open = io.open = hiding(io.open)
"""
SCRIPT = """
import os

assert not hasattr(os, "pidfd_open") and not os.path.exists("/proc/self")
import sys

import jax
import numpy as np

import atoll

with atoll.connect(join=sys.argv[1]) as devices:
    x = jax.device_put(np.arange(1 << 20, dtype=np.float32), devices[1])
    total = jax.jit(lambda x: x.sum())(x)
    small = [jax.device_put(np.full(3, i), devices[0]) for i in range(4)]
    assert [int(each.sum()) for each in jax.device_get(small)] == [0, 3, 6, 9]
    called = jax.jit(lambda x: jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct((), np.int32), x))
    assert int(called(1)) == 2
    print(len(devices), float(total) == np.arange(1 << 20, dtype=np.float32).sum(), int(np.asarray(x)[-1]))
"""


def test_a_script_without_the_functions_of_linux_uses_a_remote_cluster(user: User, tmp_path: Path) -> None:
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
