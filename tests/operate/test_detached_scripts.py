"""Tests of scripts without a terminal: their output, exit status and names, and the state after a kill."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.cluster.processes.process_table import began, boot, this_machine
from atoll.errors import ClusterError, StatusError
from atoll.operate import detached_scripts
from atoll.operate.command.run_commands import _rows
from tests.cluster_process import eventually
from tests.file_limits import no_more_files


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


def test_a_script_that_cannot_be_examined_stays(state: Path) -> None:
    first = start("run-7", "print('hello', flush=True); input() if False else __import__('time').sleep(600)")
    record = state / "scripts" / "run-7" / "script.json"
    kept = record.rename(record.with_name("kept"))
    record.symlink_to(record)
    for act in (lambda: start("run-7", "pass"), lambda: followed("run-7"), detached_scripts.scripts):
        with pytest.raises(ClusterError, match=r"cannot find out whether the script run-7 runs.*symbolic links"):
            act()
    kept.replace(record)
    with no_more_files():
        for look in (lambda: first.runs, lambda: first.state_text, detached_scripts.scripts):
            with pytest.raises(ClusterError, match="Too many open files"):
                look()
    assert [each.name for each in detached_scripts.scripts()] == ["run-7"]
    os.kill(first.keeper, signal.SIGTERM)
    assert followed("run-7")[1] == 128 + signal.SIGTERM


def test_the_output_of_a_script_is_followed_also_while_its_record_cannot_be_read() -> None:
    start("run-7", "import time\nfor i in range(20): print(i, flush=True); time.sleep(0.1)")
    parts: list[bytes] = []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(detached_scripts.follow, "run-7", parts.append)
        assert eventually(lambda: bool(parts))
        with no_more_files():
            time.sleep(0.5)
            assert not following.done()
        assert following.result(60).status == 0
    assert b"".join(parts).split() == [str(i).encode() for i in range(20)]


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


def test_a_script_counts_as_running_after_its_keeper_was_killed() -> None:
    record = start("run-7", "__import__('time').sleep(600)")
    os.kill(record.keeper, signal.SIGKILL)
    assert eventually(lambda: began(record.keeper) is None)
    with pytest.raises(ClusterError, match="run-7 runs already"):
        start("run-7", "pass")
    os.kill(record.script, signal.SIGKILL)
    assert followed("run-7") == (b"", None)


def test_two_starts_at_one_time_run_one_script() -> None:
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(start, "run-7", "__import__('time').sleep(600)") for _ in range(2)]
    for each in starts:
        if each.exception() is None:
            os.kill(each.result().keeper, signal.SIGTERM)
    (error,) = [each.exception() for each in starts if each.exception() is not None]
    assert "run-7 runs already" in str(error)
    assert followed("run-7") == (b"", 128 + signal.SIGTERM)


def written(state: Path, **fields: Any) -> detached_scripts.ScriptRecord:
    """Write a record of this process as that of a script."""
    directory = state / "scripts" / "run-7"
    directory.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    values = {"machine": this_machine(), "boot": boot(), "started": 0.0, **fields}
    record = detached_scripts.ScriptRecord("run-7", ("true",), keeper=pid, began=began(pid) or 0, **values)
    (directory / "script.json").write_bytes(msgspec.json.encode(record))
    (directory / "output").write_bytes(b"hello")
    return record


def test_a_script_of_another_machine_with_the_same_directory_keeps_its_name(state: Path) -> None:
    record = written(state, machine="elsewhere")
    with pytest.raises(ClusterError, match="run-7 was started on the machine elsewhere"):
        start("run-7", "pass")
    with pytest.raises(ClusterError, match="run-7 was started on the machine elsewhere"):
        followed("run-7")
    assert detached_scripts.scripts() == [record]
    assert record.state_text == "was started on elsewhere"


def test_a_script_does_not_run_after_its_machine_has_started_again(state: Path) -> None:
    assert written(state).state_text == "runs"
    assert written(state, boot="an earlier one").state_text == "was killed"
    assert followed("run-7") == (b"hello", None)


def test_the_output_of_a_script_is_not_followed_into_that_of_the_next_one(state: Path) -> None:
    written(state)
    with pytest.raises(ClusterError, match="run-7 was started again"):
        detached_scripts.follow("run-7", lambda part: written(state, started=1.0))


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


def test_an_unknown_name_is_answered_without_a_list_if_there_are_no_scripts() -> None:
    with pytest.raises(ClusterError, match=r"no script run-8 was started with .* on this machine$"):
        followed("run-8")


def test_the_records_of_the_last_scripts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached_scripts, "MAX_ENDED", 2)
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
