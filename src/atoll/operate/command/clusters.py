"""Clusters that stay: `atoll up`, `status` and `down`."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from atoll.cluster.settings import DEFAULT_ISLANDS
from atoll.errors import AtollError
from atoll.operate.command.options import (
    ClusterAddress,
    ClusterName,
    ClusterOptions,
    Islands,
    settings_of,
    token,
    with_cluster_options,
)
from atoll.operate.command.terminal import end_on_signals, say, terminal
from atoll.operate.registry import DEFAULT_NAME

_TABLE_WIDTH = 140  # where there is no terminal to ask


@with_cluster_options
def up(
    *,
    islands: Islands = DEFAULT_ISLANDS,
    listen: Annotated[
        str,
        typer.Option(
            help="Where the controller listens: unix:/path or HOST:PORT. A unix socket that only you can "
            "open, unless given; anything but loopback needs ATOLL_TOKEN.",
            metavar="ADDRESS",
        ),
    ] = "",
    cluster: ClusterOptions,
    name: Annotated[str, typer.Option(help="A name for it, for the other commands.")] = DEFAULT_NAME,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C ends the cluster.")
    ] = False,
) -> None:
    """Start a cluster that stays, and print its address.

    The address alone goes to standard output: `export ATOLL_ADDRESS=$(atoll up --islands 1x1x8)`. The cluster
    runs until `atoll down`, whichever scripts come and go; its messages are in the file `log` of its folder.
    """
    from atoll.operate.standing import start_cluster
    from atoll.wire.address import parse_address

    settings = settings_of(islands, cluster)
    chosen = "" if name == DEFAULT_NAME else f" --name {name}"
    standing = start_cluster(name=name, settings=settings, listen=listen, token=token(), stays=not foreground)
    if settings.engine == "hosts":
        where = parse_address(standing.record.address)
        where = replace(where, host=platform.node()) if where.host in ("0.0.0.0", "::") else where
        say(f"waiting for hosts: `ATOLL_TOKEN=... atoll host --address {where}` on each machine")
    if settings.engine != "local":
        say(f"  look:  atoll status{chosen}")
    try:
        with terminal.status(f"starting {islands} ..."):
            standing.wait()
    except AtollError:
        messages = standing.last_messages()
        if messages:
            print(messages, file=sys.stderr)
        raise
    address = standing.record.address
    print(address, flush=True)
    say(f"cluster {name} is up: {islands} on {settings.platform}")
    say(f"  run:   JAX_PLATFORMS=atoll ATOLL_ADDRESS={address} python train.py")
    if not parse_address(address).is_local:
        say("         (elsewhere: with this machine's name in the address, and the same ATOLL_TOKEN)")
    if not foreground:
        say(f"  look:  atoll status{chosen}")
        say(f"  end:   atoll down{chosen}")
        standing.leave()
        return
    say("  end:   Ctrl-C")
    end_on_signals()
    try:
        standing.wait_for_end()
    except KeyboardInterrupt:
        say("ending")
    finally:
        standing.end()


def status(
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")] = False,
    address: ClusterAddress = "",
    name: ClusterName = "",
) -> None:
    """Show a cluster: its islands, hosts and devices, the sessions that are open, and the memory they hold.

    Which cluster: --address, --name, ATOLL_ADDRESS, the embedded one of the script that runs this command, the one
    named "default", or the only one that is up; the first of these that applies. The embedded cluster of process 123
    has the name embedded-123.

    The JSON is `{"islands": [{"id", "state", "hosts": [{"id", "pid", "state", "devices": [...]}]}],
    "sessions": [...]}` and more. States are "starting", "ready", "restarting", "draining", "drained" and "lost".
    """
    from atoll.operate.clusters import find, other_clusters, report_of
    from atoll.operate.tables import status_tables

    target = find(address, name)
    report = report_of(target, token())
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        width = None if sys.stdout.isatty() else _TABLE_WIDTH
        title = target.record.title if target.record else ""
        Console(width=width, highlight=False).print(status_tables(report, str(target.address), title))
        others = other_clusters(target)
        if others:
            print("also up:", ", ".join(f"--name {each.name}" + each.title[len(each.name) :] for each in others))


def down(address: ClusterAddress = "", name: ClusterName = "") -> None:
    """End a cluster, and return when nothing is left of it: no process, no socket, no folder.

    Sessions that are open end with an error. A process that does not end within 10 seconds is ended by force,
    where it is yours and on this machine. Which cluster: as for `atoll status`, but an embedded one only by its name
    or address.
    """
    from atoll.operate.clusters import find
    from atoll.operate.standing import stop

    target = find(address, name, embedded=False)
    label = f"cluster {target.record.name}" if target.record else "the cluster"
    with terminal.status(f"ending {label} ..."):
        ended = stop(target, token())
    text = f"{label} at {target.address} has ended"
    if ended.processes >= 0:
        text += f": {ended.processes} processes"
    if ended.forced:
        text += f", {ended.forced} of them by force"
    print(text)
