"""Bug reports: `atoll bundle` and `atoll replay`."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from atoll.errors import ClusterError
from atoll.operate.command.command_options import RunningCluster, token, with_option_groups
from atoll.operate.command.terminal import echo, fail
from atoll.quantities import counted

_MAX_LINES = 20


@with_option_groups
def bundle(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Defaults to atoll-bundle-TIME.tar.gz.", metavar="FILE"),
    ] = None,
    *,
    cluster: RunningCluster,
) -> None:
    """Write a file for a bug report, and print its name.

    The file has what is known of a cluster: the report, the controller's event log, the explanation of what each
    session waits for, the log, the versions and the settings. Tokens, secrets and join tokens are replaced. It contains
    names of programs, tenants and machines. If no cluster is up, the file has the log of the last one, and its journal
    if it was killed. Addresses the same cluster as `atoll status`.
    """
    from atoll.cluster.cluster_runs import ClusterRun, runs_of
    from atoll.controller_process.journal_dump import dump_of_journal
    from atoll.operate.bug_reports import Sources, write_bundle
    from atoll.operate.cluster_logs import chosen_name
    from atoll.operate.cluster_queries import check, dump_of, report_of
    from atoll.operate.cluster_registry import ClusterRegistry

    path = output or Path(f"atoll-bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    try:
        target = cluster.find()
    except ClusterError:
        name = cluster.name or chosen_name([each.name for each in ClusterRegistry().all()])
        sources, run = None, next(iter(runs_of(name)), None) if name else None
        if run is None:
            raise
    else:
        sources = Sources(
            lambda: json.dumps(report_of(target, token()), indent=1).encode(),
            lambda: dump_of(target, token()),
            lambda: check(target, token()),
        )
        run = ClusterRun(Path(target.record.run)) if target.record is not None and target.record.run else None
    record = run.record if run is not None else None
    journal = partial(dump_of_journal, Path(record.journal)) if record is not None and record.journal else None
    try:
        for line in write_bundle(path, sources, run, os.environ, journal):
            echo(line)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    print(path)


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            help="A bundle, a file that `atoll dump` wrote, or on its machine the directory of a journal.",
            metavar="BUNDLE",
        ),
    ],
    failures: Annotated[
        bool,
        typer.Option(
            "--failures",
            help="Also handle the messages at which the controller failed, which the next controller skipped. The "
            "first one ends the command with its exception.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the whole log.")] = False,
) -> None:
    """Repeat the decisions of a controller from its events.

    Prints the number of events, the messages that the controller sent, and the end of its log with the seconds since
    the first event. A bug of the controller raises the same exception here.

    A bundle of a cluster with a journal can be replayed after any number of events, from the state in the journal.
    Other clusters keep their last 50,000 events; if the first ones are missing, they can be read but not replayed.
    """
    from atoll.operate.bug_reports import replay_bundle

    found = replay_bundle(file, not failures, None if as_json else _MAX_LINES)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))
        return
    print(f"replayed {counted(found.events, 'event')} of a controller of atoll {found.version}")
    for name, count in found.messages.items():
        print(f"  sent {count} x {name}")
    if found.log:
        print("log, in seconds since the first event:")
    for line in found.log:
        print(f"  {line}")
