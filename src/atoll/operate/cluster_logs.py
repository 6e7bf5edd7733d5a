"""The log of a standing cluster on this machine, which is also there after the cluster has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.cluster.cluster_runs import ClusterRun, RunRecord, names_of_runs, runs_of
from atoll.cluster.printable import printable_text
from atoll.cluster.processes.process_logging import LogLine, parse_line
from atoll.errors import ClusterError
from atoll.operate.cluster_registry import DEFAULT_NAME, ClusterRecord
from atoll.quantities import counted


def chosen_name(running: Sequence[str]) -> str:
    """Return the name of the cluster whose log to show if the user gives no name, or "" if there are no logs.

    That is "default" if it runs, or the only one of the `running` clusters. If none runs, it is the cluster that
    started last. Raises ClusterError if several run.
    """
    if DEFAULT_NAME in running:
        return DEFAULT_NAME
    if len(running) > 1:
        raise ClusterError(f"several clusters are up: choose one with --name ({', '.join(running)})")
    latest = {name: runs[0].directory.name for name in names_of_runs() if (runs := runs_of(name))}
    return running[0] if running else max(latest, key=lambda name: latest[name], default="")


def run_that_is_not_kept(name: str, running: Sequence[ClusterRecord]) -> ClusterRun | None:
    """Return the present run of this cluster if its log ends with it; None if the log is kept, or is not in a file."""
    for each in running:
        present = ClusterRun(Path(each.directory))
        if each.name == name and not each.run and present.log.exists():
            return present
    return None


def run_of(name: str, back: int = 0) -> ClusterRun:
    """Return the latest run of the cluster with this name, or the one that is `back` runs older.

    Raises ClusterError, which names the clusters with logs, if this cluster has no such run.
    """
    found = runs_of(name)
    if back < len(found):
        return found[back]
    if found:
        raise ClusterError(
            f"the log of cluster {name} has {counted(len(found), 'run')}: `atoll logs --runs` lists them"
        )
    known = ", ".join(names_of_runs())
    text = f"no log of a cluster {name or DEFAULT_NAME} on this machine"
    raise ClusterError(f"{text}; there are logs of {known}" if known else text)


def lines_of(run: ClusterRun, since: float = 0.0, process: str = "") -> Iterator[str]:
    """Yield the lines of a log, oldest first.

    Args:
      run: The run.
      since: The earliest time, in seconds since 1970.
      process: The kind of process, such as "worker"; "" for all. A line without a kind is of that of the line before.
    """
    for _, line in _chosen_lines(run, since, process):
        yield line


def records_of(run: ClusterRun, since: float = 0.0, process: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records of a log as JSON objects, oldest first. The arguments are those of `lines_of`.

    The lines that continue a record are part of its message. Lines before the first record are one with only a message.
    """
    fields: dict[str, Any] | None = None
    more: list[str] = []
    for found, line in _chosen_lines(run, since, process):
        if found is None and fields is not None:
            more.append(line)
            continue
        if fields is not None:
            yield _with_lines(fields, more)
        fields, more = (found.fields, []) if found is not None else ({"message": line}, [])
    if fields is not None:
        yield _with_lines(fields, more)


def _with_lines(fields: dict[str, Any], more: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a record, whose message continues with these lines."""
    return {**fields, "message": "\n".join((str(fields.get("message", "")), *more))} if more else fields


def _chosen_lines(run: ClusterRun, since: float, process: str) -> Iterator[tuple[LogLine | None, str]]:
    """Yield the lines that `lines_of` returns, each with its properties. None: it continues the line before."""
    shown = not since and not process
    for path in run.logs:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                found = parse_line(line)
                if found is not None:
                    shown = found.seconds >= since and process in ("", found.process)
                if shown:
                    yield found, printable_text(line.rstrip("\n"))


def _recorded_runs(name: str) -> Iterator[tuple[int, ClusterRun, RunRecord]]:
    """Yield the runs of the cluster with this name, latest first, each with its number for `atoll logs --run`."""
    for number, run in enumerate(runs_of(name)):
        record = run.record
        if record is not None:
            yield number, run, record


def runs_report(name: str) -> Iterator[dict[str, Any]]:
    """Yield the runs of the cluster with this name as JSON objects, latest first."""
    for number, run, record in _recorded_runs(name):
        yield {"run": number, "log": str(run.log), **msgspec.to_builtins(record)}


def runs_text(name: str) -> list[str]:
    """Return a line for each run of the cluster with this name, latest first."""
    lines = []
    for number, run, record in _recorded_runs(name):
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started))
        ended = run.end_text().partition("; log: ")[0] or "runs"
        lines.append(f"{number}  started {started}, atoll {record.version}, {record.subject}: {ended}; {run.log}")
    return lines
