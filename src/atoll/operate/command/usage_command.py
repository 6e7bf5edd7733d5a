"""Who used how much of a cluster."""

from __future__ import annotations

import json
import re
import sys
from typing import Annotated

import typer

from atoll.cluster.usage.usage_records import By
from atoll.operate.command.command_options import ClusterAddress, ClusterJoin, ClusterName, token

_TABLE_WIDTH = 140
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def usage(
    by: Annotated[By, typer.Option(help="What it is summed up by.")] = By.TENANT,
    since: Annotated[
        str,
        typer.Option(help="How far back: 90s, 10m, 1h, 7d, 4w; all that is kept if not given.", metavar="TIME"),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")] = False,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Show who used how much: time of devices, memory over time, bytes moved, time of compilation.

    Operators see all, and how much of the devices was idle; a user its own. It is kept when a cluster ends, for the
    next one of that name. Which cluster: as for `atoll status`.
    """
    from rich.console import Console

    from atoll.operate.cluster_queries import find, usage_of
    from atoll.operate.status_tables import usage_table

    seconds = _seconds(since)
    found = usage_of(find(address, name, join), token(), by, seconds)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH, highlight=False).print(usage_table(found))


def _seconds(text: str) -> float:
    if not text:
        return 0.0
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    if found is None or float(found[1]) == 0:
        raise typer.BadParameter(f"{text!r} is no time: expected a number and one of {', '.join(_UNITS)}, such as 1h")
    return float(found[1]) * _UNITS[found[2]]
