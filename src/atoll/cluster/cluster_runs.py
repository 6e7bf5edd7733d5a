"""The runs of standing clusters: their logs and the reasons for their ends, which are kept after the cluster has ended.

Each run of a cluster has a directory in `directories.logs_directory`:

    NAME/20261126-200555-4711/    the run that began at this local time, with the process id of `atoll up`
        run.json                  `RunRecord`
        log, log.1                the messages of its processes, and earlier ones

Invariant: the times in the names increase from run to run, also if the clock is set back or runs begin in one second.
"""

from __future__ import annotations

import calendar
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from atoll._version import __version__
from atoll.atomic_files import write_atomically
from atoll.cluster.directories import logs_directory
from atoll.decodable import decodable
from atoll.errors import ClusterError
from atoll.missing import MISSING, read_if_exists
from atoll.quantities import human_seconds

_log = logging.getLogger(__name__)

KEPT_RUNS = 5  # of clusters per name, and as many of standbys, with the present one
MAX_LOG_BYTES = 16 << 20  # of `log`; `log.1` has as many
ROTATE_SECONDS = 2.0  # between two looks at the size of a log
_RECORD, _LOG, _OLDER_LOG = "run.json", "log", "log.1"
_COPY_BYTES = 1 << 20
_STAMP = "%Y%m%d-%H%M%S"


class RunRecord(msgspec.Struct, frozen=True):
    """A run. Times are in seconds since 1970."""

    name: str  # name of the cluster
    address: str = ""  # address of its controller
    islands: str = ""  # the islands, as in `--islands`
    version: str = __version__  # version of Atoll
    started: float = 0.0  # time of its start
    ended: float = 0.0  # time of its end; 0: it runs
    reason: str = ""  # why it ended
    expected: bool = False  # whether somebody asked for the end
    journal: str = ""  # directory of its journal; empty: it has none
    standby: str = ""  # address of the controller that a standby follows; empty: it is a cluster

    @property
    def kind(self) -> str:
        return "standby" if self.standby else "cluster"

    @property
    def subject(self) -> str:
        """The islands of a cluster, or the controller that a standby follows."""
        return f"standby of {self.standby}" if self.standby else self.islands


class ClusterRun:
    """One run of a standing cluster, in its directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def log(self) -> Path:
        return self.directory / _LOG

    @property
    def logs(self) -> list[Path]:
        """The files of its log that exist, oldest first."""
        return [path for path in (self.directory / _OLDER_LOG, self.log) if path.exists()]

    @property
    def record_file(self) -> Path:
        return self.directory / _RECORD

    @property
    def record(self) -> RunRecord | None:
        """Its record; None if it is missing or of another version. Raises ClusterError if it cannot be read."""
        try:
            content = read_if_exists(self.record_file)
        except OSError as error:
            raise ClusterError(f"cannot read {self.record_file}: {error.strerror}") from None
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(content, type=decodable(RunRecord)) if content else None
        return None

    @property
    def is_standby(self) -> bool:
        """Whether its record is that of a standby."""
        record = self.record
        return record is not None and bool(record.standby)

    def begin(self, record: RunRecord) -> None:
        """Write the record of a run that begins. Raises OSError."""
        write_atomically(self.record_file, msgspec.json.encode(record))

    def end(self, reason: str, *, expected: bool = False, ended: float = 0.0) -> None:
        """Record the end, now or at `ended`, unless it is recorded already."""
        with contextlib.suppress(OSError, ClusterError):
            record = self.record
            if record is None or record.ended:
                return
            ended = ended or time.time()
            self.begin(msgspec.structs.replace(record, reason=reason, expected=expected, ended=ended))

    def end_unknown(self, who: str) -> None:
        """Record the end of a run whose engine could not, because it was killed or its machine has restarted."""
        with contextlib.suppress(OSError):
            self.end(
                f"{who} was killed or the machine was restarted (the time is that of the last line of the log)",
                ended=self.log.stat().st_mtime,
            )

    def end_text(self) -> str:
        """Describe the end for people; "" if it is not known."""
        record = self.record
        if record is None or not record.ended:
            return ""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.ended))
        ago = human_seconds(max(0.0, time.time() - record.ended))
        return f"{record.kind} {record.name} ended at {when} ({ago} ago): {record.reason}; log: {self.log}"


def open_log(record: RunRecord, directory: Path) -> tuple[BinaryIO, ClusterRun | None]:
    """Open the log of a new run of a cluster or standby, and return it with the run, which has the record.

    The cluster's own `directory`, which is removed at its end, gets a link `log`; or the log itself if there is no run.
    """
    run = new_run(record)
    if run is not None:
        (directory / _LOG).symlink_to(run.log)
    return open(directory / _LOG, "a+b"), run


def new_run(record: RunRecord) -> ClusterRun | None:
    """Return a new run of a cluster or standby with this record, and remove its oldest runs of the same kind.

    Return None if this user keeps no state (see `directories.logs_directory`), or, after a warning, if the directory
    cannot be written, for example because the disk is full.
    """
    name = record.name
    base = logs_directory()
    if base is None:
        return None
    try:
        known = runs_of(name)
        latest = ClusterRun(base / name / f"{_stamp_after(known)}-{os.getpid()}")
        latest.directory.mkdir(mode=0o700, parents=True)
        try:
            latest.begin(record)
        except OSError:
            shutil.rmtree(latest.directory, ignore_errors=True)
            raise
    except (OSError, ClusterError) as error:
        _log.warning("the log of cluster %s will be lost when the cluster ends: %s", name, error)
        return None
    earlier = []
    for run in known:
        with contextlib.suppress(ClusterError):  # such a run stays
            if run.is_standby == bool(record.standby):
                earlier.append(run)
    for run in earlier[KEPT_RUNS - 1 :]:
        shutil.rmtree(run.directory, ignore_errors=True)
    return latest


def _stamp_after(known: Sequence[ClusterRun]) -> str:
    """Return the local time, or the second after the latest of the `known` runs if that is later."""
    now = time.strftime(_STAMP)
    latest = known[0].directory.name[: len(now)] if known else ""
    if latest < now:
        return now
    try:
        return time.strftime(_STAMP, time.gmtime(calendar.timegm(time.strptime(latest, _STAMP)) + 1))
    except ValueError:  # a directory that is not a run's
        return now


def runs_of(name: str) -> list[ClusterRun]:
    """Return the runs of the cluster with this name, latest first. Raises ClusterError if they cannot be listed."""
    base = logs_directory()
    found = sorted(_listed(base / name), reverse=True) if base is not None else []
    return [ClusterRun(directory) for directory in found if directory.is_dir()]


def names_of_runs() -> list[str]:
    """Return the names of all clusters with runs. Raises ClusterError if they cannot be listed."""
    base = logs_directory()
    return sorted(each.name for each in _listed(base)) if base is not None else []


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except MISSING:
        return []
    except OSError as error:
        raise ClusterError(f"cannot list the runs in {directory}: {error.strerror}") from None


def rotate(log: Path, limit: int = MAX_LOG_BYTES) -> None:
    """Move the content of a log to `log.1` if it is larger than `limit` bytes.

    Processes have the file open for appending, so it is copied and truncated. Lines that are written in between are
    lost.
    """
    with contextlib.suppress(OSError):
        size = log.stat().st_size
        if size <= limit:
            return
        older = log.with_name(_OLDER_LOG)
        with open(log, "rb") as source, open(older, "wb") as target:
            source.seek(size - limit)
            source.readline()  # begin with a whole line
            shutil.copyfileobj(source, target, _COPY_BYTES)
            os.truncate(log, 0)
