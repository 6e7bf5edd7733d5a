"""Scripts without a terminal: their output, their exit status, their names, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from atoll.errors import ClusterError, StatusError
from atoll.operate import detached_scripts
from atoll.operate.command.run_commands import _rows
from tests.cluster_process import eventually


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path))
    return tmp_path


def start(name: str, code: str) -> detached_scripts.ScriptRecord:
    return detached_scripts.start(name, [sys.executable, "-c", code], os.environ)


def followed(name: str) -> tuple[bytes, int | None]:
    parts: list[bytes] = []
    record = detached_scripts.follow(name, parts.append)
    return b"".join(parts), record.status


def test_the_output_of_a_script_is_followed_to_its_exit_status() -> None:
    start("run-7", "import sys; print('hello'); sys.exit(3)")
    assert followed("run-7") == (b"hello\n", 3)
    assert followed("run-7") == (b"hello\n", 3)  # also after its end


def test_a_name_has_one_script_until_it_ends() -> None:
    first = start("run-7", "input() if False else __import__('time').sleep(600)")
    with pytest.raises(ClusterError, match="run-7 runs already"):
        start("run-7", "pass")
    os.kill(first.keeper, signal.SIGTERM)
    assert followed("run-7") == (b"", 128 + signal.SIGTERM)
    start("run-7", "print('again')")
    assert followed("run-7") == (b"again\n", 0)


def test_a_script_whose_keeper_was_killed_does_not_count_as_running() -> None:
    record = start("run-7", "import os; print(os.getpid(), flush=True); __import__('time').sleep(600)")
    output: list[bytes] = []
    output_file = Path(os.environ["ATOLL_STATE_DIR"]) / "scripts" / "run-7" / "output"
    assert eventually(lambda: output_file.read_bytes().endswith(b"\n"))
    os.kill(record.keeper, signal.SIGKILL)
    os.kill(int(output_file.read_bytes()), signal.SIGKILL)
    assert detached_scripts.follow("run-7", output.append).status is None
    (found,) = detached_scripts.scripts()
    assert found.state_text == "was killed"


def test_a_command_that_does_not_exist_is_named() -> None:
    detached_scripts.start("run-7", ["no-such-command"], os.environ)
    assert followed("run-7") == (b"atoll: no-such-command: No such file or directory\n", 127)


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    start("run-7", "pass")
    with pytest.raises(ClusterError, match=r"no script run-8 .*; known are run-7"):
        followed("run-8")
    with pytest.raises(StatusError, match="invalid name"):
        followed("../run-7")
    followed("run-7")


def test_the_records_of_the_last_scripts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached_scripts, "MOST_ENDED", 2)
    for number in range(4):
        start(f"run-{number}", "pass")
        followed(f"run-{number}")
    assert [each.name for each in detached_scripts.scripts()] == ["run-2", "run-3"]


def test_a_run_has_one_row_with_its_script_and_its_session() -> None:
    record = detached_scripts.ScriptRecord("run-7", ("python", "train.py"), 0.0, 0, 1, status=0)
    sessions = [
        {"run": "run-7", "id": 3, "state": "detached", "in_flight": 5, "label": "train.py"},
        {"run": "run-8", "id": 4, "state": "", "in_flight": 0, "label": "serve.py"},
    ]
    first, second = _rows(sessions, [record])
    assert list(first.values()) == ["run-7", "exited with 0", "3 detached", 5, "python train.py"]
    assert list(second.values()) == ["run-8", "", "4 attached", 0, "serve.py"]
