"""Processes that are forked from one that has imported JAX: like those that are executed, as far as tests can tell."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.cluster.processes.process_runtime import command
from atoll.cluster.sandbox.grants import Sandbox
from atoll.protocol.messages.python_messages import ClientSettings, PythonOptions
from tests.forked_process import FORKING, Popen, children, run

SHOWN = """
import json, os, sys
import jax
print(json.dumps([sys.argv[1:], __name__, os.getcwd(), os.environ["OF_THE_TEST"], jax.config.jax_enable_x64]))
"""


@pytest.fixture(autouse=True)
def _forks() -> Iterator[None]:
    with FORKING.on():
        yield


def start(script: Path, code: str, *arguments: str, **environment: str) -> Popen:
    script.write_text(code)
    return Popen(
        [sys.executable, str(script), *arguments],
        env=os.environ | environment,
        cwd=script.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_no_tables_of_a_client_are_those_of_the_server() -> None:
    """In a fork, they would send and receive nothing."""
    code = "import sys; print([name for name in sys.modules if name.startswith('atoll.client')])"
    assert run([sys.executable, "-c", code], timeout=300.0).stdout == "[]\n"


def test_a_script_has_its_arguments_directory_environment_and_settings_of_jax(tmp_path: Path) -> None:
    process = start(tmp_path / "a.py", SHOWN, "x", "y", OF_THE_TEST="1", JAX_ENABLE_X64="0")
    stdout, stderr = process.communicate(timeout=300)
    assert stdout == f'[["x", "y"], "__main__", "{tmp_path}", "1", false]\n'
    assert (process.returncode, stderr) == (0, "")


def test_a_process_finds_the_plug_ins_of_its_own_path(tmp_path: Path) -> None:
    code = "from importlib.metadata import *; print(sorted(each.name for each in entry_points(group='jax_plugins')))"
    stdout, stderr = start(tmp_path / "a.py", code).communicate(timeout=300)
    assert "atoll" in stdout, stderr
    metadata = tmp_path / "other-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: other\n")
    (metadata / "entry_points.txt").write_text("[jax_plugins]\nother = other\n")
    assert "'other'" in start(tmp_path / "a.py", code).communicate(timeout=300)[0]


def test_others_see_its_command_line_environment_session_and_parent(tmp_path: Path) -> None:
    with start(tmp_path / "a.py", "input()", "x", OF_THE_TEST="2") as process:
        seen = psutil.Process(process.pid)
        assert seen.cmdline() == [sys.executable, str(tmp_path / "a.py"), "x"]
        assert seen.environ()["OF_THE_TEST"] == "2"
        assert os.getsid(process.pid) == process.pid
        assert process.pid in [each.pid for each in children(os.getpid())]
        assert seen.ppid() != os.getpid(), "it was executed"
        assert process.poll() is None
        process.communicate("\n", timeout=300)
    assert process.returncode == 0


def test_a_process_that_it_forks_by_itself_is_its_own_child(tmp_path: Path) -> None:
    code = "import os, time\npid = os.fork()\nif not pid:\n    time.sleep(300)\nprint(pid, flush=True)\ninput()"
    with start(tmp_path / "a.py", code) as process:
        assert process.stdout is not None
        own = int(process.stdout.readline())
        found = [each.pid for each in children(os.getpid())]
        assert process.pid in found
        assert own not in found
        assert own in [each.pid for each in children(os.getpid(), recursive=True)]
        os.kill(own, signal.SIGKILL)
        process.communicate("\n", timeout=300)


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_its_status_is_that_of_the_script(tmp_path: Path, code: str, status: int, error: str) -> None:
    process = start(tmp_path / "a.py", code)
    assert process.communicate(timeout=300)[1] == error
    assert process.returncode == status


def test_a_traceback_has_the_frames_of_the_script_alone(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    process = start(script, "raise ValueError('mine')")
    assert process.communicate(timeout=300)[1] == (
        f'Traceback (most recent call last):\n  File "{script}", line 1, in <module>\n'
        "    raise ValueError('mine')\nValueError: mine\n"
    )


@pytest.mark.parametrize("name", ["PYTHONWARNINGS", "LD_PRELOAD", "ATOLL_TEST_EXECUTED"])
def test_what_python_reads_at_its_start_has_it_executed(tmp_path: Path, name: str) -> None:
    with start(tmp_path / "a.py", "input()", **{name: "default" if name == "PYTHONWARNINGS" else "1"}) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid()
        process.communicate("\n", timeout=300)


def test_a_customized_start_of_python_has_it_executed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").touch()
    with start(tmp_path / "a.py", "input()", PYTHONPATH=str(tmp_path)) as process:
        assert psutil.Process(process.pid).ppid() == os.getpid()
        process.communicate("\n", timeout=300)


def test_the_python_process_of_a_session_ends_with_its_parent() -> None:
    """Its link, which is open at this end, does not end it."""
    ours, theirs = socket.socketpair()
    options = PythonOptions(theirs.fileno(), ((0,),), 0, ClientSettings(), Sandbox(), "", "")
    started = command("atoll.host_services.python.program.python_main", options)
    kept = (theirs.fileno(),)
    code = f"import subprocess, sys; print(subprocess.Popen(sys.argv[1:], pass_fds={kept}).pid, flush=True); input()"
    with ours, theirs:
        parent = Popen(
            [sys.executable, "-c", code, *started],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=kept,
            text=True,
            start_new_session=True,
        )
        with parent:
            python = psutil.Process(int(parent.stdout.readline()))
            assert python.cmdline() == started
            assert python.ppid() != parent.pid, "it was executed"
            parent.kill()
        psutil.wait_procs([python], 60.0)
        assert not python.is_running()
