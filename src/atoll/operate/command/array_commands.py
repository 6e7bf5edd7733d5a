"""The published arrays of a cluster: `atoll arrays`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import msgspec
import typer

from atoll.decodable import decodable
from atoll.operate.command.command_help import HelpCommand, HelpGroup
from atoll.operate.command.command_options import RunningCluster, token, with_option_groups

app = typer.Typer(name="arrays", cls=HelpGroup, invoke_without_command=True, rich_markup_mode=None)
_WIDTH = 140  # without a terminal


@app.callback()
@with_option_groups
def arrays(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    cluster: RunningCluster,
) -> None:
    """List the published arrays of a cluster, or remove some.

    The list has names and versions, with their sizes, places and readers. The column "sent" has the bytes that the
    version has sent to readers on other islands, and "passed on" those that readers have sent to later ones.

    Operators see all names, users those that their scripts may read. The list has the 500 newest versions. Addresses
    the same cluster as `atoll status`.
    """
    from rich.console import Console

    from atoll.operate.cluster_queries import report_of
    from atoll.operate.status_tables import versions_table
    from atoll.telemetry.snapshot import Snapshot

    if context.invoked_subcommand is not None:
        return
    report = report_of(cluster.find(), token())
    if as_json:
        print(json.dumps(report["versions"], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False).print(
            versions_table(msgspec.convert(report, decodable(Snapshot)).versions)
        )


@app.command("rm", cls=HelpCommand)
@with_option_groups
def remove(
    published: Annotated[str, typer.Argument(help="Name of the arrays, or TENANT/NAME.", metavar="NAME")],
    version: Annotated[
        int | None, typer.Option(min=1, help="Number of the version. Defaults to all versions.", metavar="N")
    ] = None,
    *,
    cluster: RunningCluster,
) -> None:
    """Remove published arrays.

    Scripts that are reading a version can complete their reads. Users can remove arrays of their own tenant, operators
    all.
    """
    from atoll.operate.cluster_queries import operate
    from atoll.protocol.messages import RemoveArraysRequest

    print(operate(cluster.find(), token(), RemoveArraysRequest(published, -1 if version is None else version)))
