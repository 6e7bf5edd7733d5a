"""The log of a cluster: `atoll logs`."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from atoll.operate.command.command_options import read_time_span

_KINDS = ("engine", "controller", "worker")


def logs(
    name: Annotated[
        str,
        typer.Option(
            help='Name of the cluster. Defaults to "default" or the only one that is up, or to the last one.',
            metavar="NAME",
        ),
    ] = "",
    since: Annotated[
        str, typer.Option(help="Show only lines of this last time, such as 90s, 10m, 1h, 7d or 4w.", metavar="TIME")
    ] = "",
    process: Annotated[
        str,
        typer.Option(help="Show only lines of this kind of process: engine, controller or worker.", metavar="KIND"),
    ] = "",
    run: Annotated[
        int,
        typer.Option("--run", min=0, help="Show the log of an earlier run: 1 is the one before the last.", metavar="N"),
    ] = 0,
    runs: Annotated[bool, typer.Option("--runs", help="List the runs whose logs are kept, with their ends.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object per line for each record, or for each run.")
    ] = False,
) -> None:
    """Show the log of a cluster, even after it has ended.

    The logs of the last 5 runs per name, and of the last 5 standbys, are kept in ATOLL_STATE_DIR, with 32 MiB each at
    most. The log has the messages of the processes on this machine; `atoll host` prints those of another machine there.

    The JSON of a record is `{"time", "level", "process", "pid", "logger", "message"}` and more, with the time in UTC.
    """
    if process and process not in _KINDS:
        raise typer.BadParameter(f"--process {process!r}: expected {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    from atoll.operate.cluster_logs import (
        chosen_name,
        lines_of,
        records_of,
        run_of,
        run_that_is_not_kept,
        runs_report,
        runs_text,
    )
    from atoll.operate.cluster_registry import ClusterRegistry

    running = ClusterRegistry().all()  # also records the ends of clusters that were killed
    name = name or chosen_name([each.name for each in running])
    present = None if run or runs else run_that_is_not_kept(name, running)
    found = present or run_of(name, run)
    if runs:
        for each in map(json.dumps, runs_report(name)) if as_json else runs_text(name):
            print(each)
        return
    seconds = read_time_span(since)
    earliest = time.time() - seconds if seconds else 0.0
    records = map(json.dumps, records_of(found, earliest, process)) if as_json else lines_of(found, earliest, process)
    for line in records:
        print(line)
