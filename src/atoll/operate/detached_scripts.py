"""Scripts that run without a terminal: `atoll run --detach` starts them, `atoll attach` follows their output.

Each has a directory with its name in `state_directory`, which has its record and its output. A *keeper* process starts
the script, waits for its end, and adds its exit status to the record. Until the keeper has started, the command that
starts it stands in the record as its keeper. Machines may share the directories, but not the meaning of pids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.array_names import check_array_name
from atoll.cluster.directories import OFF, state_directory
from atoll.cluster.environment_variables import STATE_DIRECTORY
from atoll.cluster.processes.process_table import began, boot, this_machine
from atoll.decodable import decodable
from atoll.errors import ClusterError
from atoll.missing import exists, read_if_exists

MAX_ENDED = 20  # records of ended scripts that are kept
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
      script: process of the script; 0 until it has started. `script_began` is the start time of that process.
      machine: the machine of these processes.
      boot: the start of that machine at which they run.
    """

    name: str
    command: tuple[str, ...]
    started: float
    keeper: int
    began: int
    status: int | None = None
    script: int = 0
    script_began: int = 0
    machine: str = ""
    boot: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the script may run on another machine."""
        return self.status is None and self.machine != this_machine()

    @property
    def runs(self) -> bool:
        """Return whether the script runs on this machine, with or without its keeper.

        Raise ClusterError if that is unknown.
        """
        if self.status is not None or self.is_elsewhere:
            return False
        with _examining(self.name):
            return self.boot == boot() and self._has_process()

    def _has_process(self) -> bool:
        return began(self.keeper) == self.began or began(self.script) == self.script_began

    @property
    def state_text(self) -> str:
        """Return the state in a few words."""
        if self.is_elsewhere:
            return f"was started on {self.machine}"
        if self.runs:
            return "runs"
        return "was killed" if self.status is None else f"exited with {self.status}"


def start(name: str, command: Sequence[str], environment: Mapping[str, str]) -> ScriptRecord:
    """Start a script without a terminal. Raise ClusterError if a script with this name runs, or may run."""
    check_array_name(name)
    if STATE_DIRECTORY.text() == OFF:
        raise ClusterError("the output of a detached script needs a directory: ATOLL_STATE_DIR is off")
    directory, own = _directory(name), os.getpid()
    record = ScriptRecord(name, tuple(command), time.time(), own, began(own) or 0, machine=this_machine(), boot=boot())
    with _locked():
        _check_free(_read(directory), directory)
        _remove_ended()
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        _write(directory, record)
    try:
        return _start_keeper(directory, record, environment)
    except BaseException:
        if _read(directory) == record:
            _write(directory, msgspec.structs.replace(record, status=1))
        raise


def _check_free(former: ScriptRecord | None, directory: Path) -> None:
    """Raise ClusterError if a script with the name runs, or may run on another machine."""
    if former is None:
        return
    if former.is_elsewhere:
        raise ClusterError(
            f"{former.name} was started on the machine {former.machine} and may run there: end it there. "
            f"If that machine does not exist any more, remove {directory}"
        )
    if former.runs:
        raise ClusterError(f"{former.name} runs already: `atoll attach {former.name}` follows its output")


def _start_keeper(directory: Path, record: ScriptRecord, environment: Mapping[str, str]) -> ScriptRecord:
    """Start the keeper. Return the record that it writes when it has started the script."""
    with open(directory / _OUTPUT, "wb") as output:
        subprocess.run(
            [sys.executable, "-m", "atoll.operate.script_keeper", str(directory), record.name, *record.command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(ClusterError):  # the record cannot be read now
            found = _read(directory)
            if found is not None and found != record:
                return found
        if time.monotonic() > deadline:
            raise ClusterError(f"{record.name} did not start within {_START_SECONDS:.0f} s: see {directory / _OUTPUT}")
        time.sleep(_POLL_SECONDS)


def keep(directory: Path, command: Sequence[str]) -> None:
    """Run the script in a process that this one does not wait for, and record its exit status.

    SIGTERM ends the script. Called in the keeper process, which has one thread.
    """
    if os.fork():
        return
    pid, record = os.getpid(), _read(directory)
    if record is None or record.status is not None:  # the command that starts it has given up
        return
    record = msgspec.structs.replace(record, keeper=pid, began=began(pid) or 0)
    try:
        script = subprocess.Popen(command)
    except OSError as error:
        print(f"atoll: {command[0]}: {error.strerror}", flush=True)
        _write(directory, msgspec.structs.replace(record, status=127))
        return
    signal.signal(signal.SIGTERM, lambda *_: script.terminate())
    record = msgspec.structs.replace(record, script=script.pid, script_began=began(script.pid) or 0)
    _write(directory, record)
    status = script.wait()
    _write(directory, msgspec.structs.replace(record, status=status if status >= 0 else 128 - status))


def scripts() -> list[ScriptRecord]:
    """Return the scripts of this user on this machine, oldest first. Raise ClusterError if one cannot be read."""
    with _examining("of this user"):
        directories = list(_base().iterdir()) if exists(_base()) else []
    found = map(_read, directories)
    return sorted((each for each in found if each is not None), key=lambda each: each.started)


def follow(name: str, write: Callable[[bytes], object]) -> ScriptRecord:
    """Pass the output of a script to `write` until the script ends.

    Raise ClusterError if there is no such script, if it may run on another machine, or if it was started again.
    """
    directory = _directory(check_array_name(name))
    record = _read(directory)
    if record is None:
        known = ", ".join(each.name for each in scripts())
        text = f"no script {name} was started with `atoll run --detach` on this machine"
        raise ClusterError(f"{text}; known are {known}" if known else text)
    if record.is_elsewhere:
        raise ClusterError(
            f"{name} was started on the machine {record.machine}: `atoll attach {name}` follows it there"
        )
    with open(directory / _OUTPUT, "rb") as output:
        while True:
            is_over = _is_over(record)  # before the last look at its output
            while part := output.read(1 << 16):
                write(part)
            if is_over:
                return record
            time.sleep(_POLL_SECONDS)
            found = record
            with contextlib.suppress(ClusterError):  # the record cannot be read now
                found = _read(directory) or record
            if found.started != record.started:
                raise ClusterError(f"{name} was started again: `atoll attach {name}` follows the new script")
            record = found


def _is_over(record: ScriptRecord) -> bool:
    """Return whether the script is known to have ended."""
    with contextlib.suppress(ClusterError):
        return not record.runs
    return False


def _base() -> Path:
    return state_directory() / "scripts"


def _directory(name: str) -> Path:
    return _base() / name


def _read(directory: Path) -> ScriptRecord | None:
    """Return the record in a directory, or None if it is missing or invalid. Raise ClusterError if it is unreadable."""
    with _examining(directory.name):
        content = read_if_exists(directory / _RECORD)
    with contextlib.suppress(msgspec.MsgspecError):
        return None if content is None else msgspec.json.decode(content, type=decodable(ScriptRecord))
    return None


@contextlib.contextmanager
def _examining(name: str) -> Iterator[None]:
    """Raise ClusterError for an OSError in this block, which does not show whether the script runs."""
    try:
        yield
    except OSError as error:
        raise ClusterError(f"cannot find out whether the script {name} runs, so nothing is changed: {error}") from None


def _write(directory: Path, record: ScriptRecord) -> None:
    write_atomically(directory / _RECORD, msgspec.json.encode(record))


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep other `atoll` commands of this user from adding or removing records, inside the block."""
    base = _base()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(base.with_suffix(".lock"), "wb") as file:  # NFS locks no directories
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_ended() -> None:
    """Remove the records of all but the last scripts that have ended."""
    ended = [each for each in scripts() if not (each.runs or each.is_elsewhere)]
    for each in ended[: max(0, len(ended) + 1 - MAX_ENDED)]:
        shutil.rmtree(_directory(each.name), ignore_errors=True)
