"""Scripts that run without a terminal: `atoll run --detach` starts them, `atoll attach` follows their output.

Each has a directory with its name in `state_directory`, which has its record and its output. A *keeper* process starts
the script, waits for its end, and adds its exit status to the record.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.array_names import check_array_name
from atoll.cluster.directories import OFF, state_directory
from atoll.cluster.environment_variables import STATE_DIRECTORY
from atoll.cluster.processes.process_table import began
from atoll.errors import ClusterError

MOST_ENDED = 20  # records of ended scripts that are kept
_RECORD, _OUTPUT = "script.json", "output"
_POLL_SECONDS = 0.1
_START_SECONDS = 30.0


class ScriptRecord(msgspec.Struct, frozen=True):
    """A script that was started with `atoll run --detach`.

    Attributes:
      name: its run.
      command: the command and its arguments.
      started: seconds since 1970.
      keeper: process that waits for the script. `began` is the start time of that process, in ticks of the clock.
      status: exit status, as of a shell, or None while the script runs.
    """

    name: str
    command: tuple[str, ...]
    started: float
    keeper: int
    began: int
    status: int | None = None

    @property
    def runs(self) -> bool:
        return self.status is None and began(self.keeper) == self.began

    @property
    def state_text(self) -> str:
        """Return the state in a few words."""
        if self.runs:
            return "runs"
        return "was killed" if self.status is None else f"exited with {self.status}"


def start(name: str, command: Sequence[str], environment: Mapping[str, str]) -> ScriptRecord:
    """Start a script without a terminal. Raise ClusterError if a script with this name runs."""
    check_array_name(name)
    if STATE_DIRECTORY.text() == OFF:
        raise ClusterError("the output of a detached script needs a directory: ATOLL_STATE_DIR is off")
    directory = _directory(name)
    former = _read(directory)
    if former is not None and former.runs:
        raise ClusterError(f"{name} runs already: `atoll attach {name}` follows its output")
    _remove_ended()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    with open(directory / _OUTPUT, "wb") as output:
        subprocess.run(
            [sys.executable, "-m", "atoll.operate.script_keeper", str(directory), name, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while (found := _read(directory)) is None:
        if time.monotonic() > deadline:
            raise ClusterError(f"{name} did not start within {_START_SECONDS:.0f} s: see {directory / _OUTPUT}")
        time.sleep(_POLL_SECONDS)
    return found


def keep(directory: Path, name: str, command: Sequence[str]) -> None:
    """Run the script in a process that this one does not wait for, and record its exit status.

    SIGTERM ends the script. Called in the keeper process, which has one thread.
    """
    if os.fork():
        return
    pid = os.getpid()
    record = ScriptRecord(name, tuple(command), time.time(), pid, began(pid) or 0)
    try:
        script = subprocess.Popen(command)
    except OSError as error:
        print(f"atoll: {command[0]}: {error.strerror}", flush=True)
        _write(directory, msgspec.structs.replace(record, status=127))
        return
    signal.signal(signal.SIGTERM, lambda *_: script.terminate())
    _write(directory, record)
    status = script.wait()
    _write(directory, msgspec.structs.replace(record, status=status if status >= 0 else 128 - status))


def scripts() -> list[ScriptRecord]:
    """Return the scripts of this user on this machine, oldest first."""
    found = [_read(each) for each in _base().iterdir()] if _base().is_dir() else []
    return sorted((each for each in found if each is not None), key=lambda each: each.started)


def follow(name: str, write: Callable[[bytes], object]) -> ScriptRecord:
    """Pass the output of a script to `write` until the script ends. Raise ClusterError if there is no such script."""
    directory = _directory(check_array_name(name))
    record = _read(directory)
    if record is None:
        known = ", ".join(each.name for each in scripts()) or "none"
        raise ClusterError(f"no script {name} was started with `atoll run --detach` on this machine; known are {known}")
    with open(directory / _OUTPUT, "rb") as output:
        while True:
            is_over = not record.runs  # before the last look at its output
            while part := output.read(1 << 16):
                write(part)
            if is_over:
                return record
            time.sleep(_POLL_SECONDS)
            record = _read(directory) or record


def _base() -> Path:
    return state_directory() / "scripts"


def _directory(name: str) -> Path:
    return _base() / name


def _read(directory: Path) -> ScriptRecord | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((directory / _RECORD).read_bytes(), type=ScriptRecord)
    return None


def _write(directory: Path, record: ScriptRecord) -> None:
    write_atomically(directory / _RECORD, msgspec.json.encode(record))


def _remove_ended() -> None:
    """Remove the records of all but the last scripts that have ended."""
    ended = [each for each in scripts() if not each.runs]
    for each in ended[: max(0, len(ended) + 1 - MOST_ENDED)]:
        shutil.rmtree(_directory(each.name), ignore_errors=True)
