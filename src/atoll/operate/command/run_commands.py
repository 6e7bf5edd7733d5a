"""Named runs and the scripts that run without a terminal: `atoll attach` and `atoll ps`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from atoll.operate.command.command_options import RunningCluster, token, with_option_groups
from atoll.operate.command.terminal import echo

_WIDTH = 140  # without a terminal


def attach(
    name: Annotated[str, typer.Argument(help="Name of the run.", metavar="NAME")],
) -> None:
    """Follow the output of a script of `atoll run --detach`.

    The script was started on this machine. The command ends with the script, and with its exit status. Ctrl-C ends only
    this command, and the script continues.
    """
    from atoll.operate.detached_scripts import follow

    def write(part: bytes) -> None:
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()

    try:
        record = follow(name, write)
    except KeyboardInterrupt:
        echo(f"{name} continues: `atoll attach {name}` follows it again")
        return
    if record.status is None:
        echo(f"{name} was killed")
    sys.exit(1 if record.status is None else record.status)


@with_option_groups
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    cluster: RunningCluster,
) -> None:
    """List named runs, and the scripts of `atoll run --detach`.

    The list has the named runs of a cluster, and the scripts that were started on this machine. A run is attached if
    its script runs, and detached if the script has ended and its submitted work continues. Addresses the same cluster
    as `atoll status`. Without a cluster, the list has only the scripts.
    """
    from rich.console import Console

    from atoll.operate.detached_scripts import scripts
    from atoll.operate.text_tables import TextTable, number_column, text_column

    rows = _rows(_sessions(cluster), scripts())
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    if not rows:
        print("no named runs")
        return
    table = TextTable(
        "Runs",
        *map(text_column, ("run", "script", "session")),
        number_column("launches in flight"),
        text_column("command"),
    )
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("run", "script", "session", "in_flight", "command")))
    Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(table)


def _sessions(cluster: RunningCluster) -> list[dict[str, Any]]:
    """Return the sessions of named runs, or none if there is no cluster."""
    from atoll.errors import ClusterError
    from atoll.operate.cluster_queries import report_of

    try:
        target = cluster.find()
    except ClusterError:
        if cluster.address or cluster.name or cluster.join:
            raise
        return []
    return [each for each in report_of(target, token())["sessions"] if each["run"]]


def _rows(sessions: list[dict[str, Any]], scripts: list[Any]) -> list[dict[str, Any]]:
    """Return a row for each run: its script on this machine, and its session."""
    by_run = {each["run"]: each for each in sessions}
    known = {each.name: each for each in scripts}
    rows = []
    for run in [*known, *(run for run in by_run if run not in known)]:
        session, script = by_run.get(run), known.get(run)
        state = "" if session is None else f"{session['id']} {session['state'] or 'attached'}"
        label = "" if session is None else session["label"]
        rows.append(
            {
                "run": run,
                "script": "" if script is None else script.state_text,
                "session": state,
                "in_flight": "" if session is None else session["in_flight"],
                "command": label if script is None else " ".join(script.command),
            }
        )
    return rows
