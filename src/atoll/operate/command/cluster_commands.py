"""Standing clusters: `atoll up`, `status` and `down`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console

from atoll.cluster.environment_variables import AUTHORITY, LEADER_LEASE
from atoll.cluster.settings import DEFAULT_ENGINE, SETTINGS, ClusterSettings
from atoll.cluster.tenant_settings import DEFAULT_NAME as DEFAULT_TENANT_NAME
from atoll.cluster.tenant_settings import TENANT_MARK
from atoll.decodable import decodable
from atoll.errors import AtollError, ClusterError, LeaseError
from atoll.operate.cluster_registry import DEFAULT_NAME
from atoll.operate.command.command_options import (
    ClusterOptions,
    RunningCluster,
    StandingIslands,
    tenant_tokens,
    token,
    up_settings,
    with_option_groups,
)
from atoll.operate.command.json_output import AsJson, print_json
from atoll.operate.command.terminal import echo, end_on_signals, fail, terminal
from atoll.quantities import counted

if TYPE_CHECKING:
    from atoll.operate.standing import StandingCluster, StandingOnRay, StandingOptions
    from atoll.security.join_token import JoinToken

_TABLE_WIDTH = 140  # without a terminal

JoinFile = Annotated[
    Path | None,
    typer.Option(
        "--join-file",
        help="Write the join token of clients to this file, which only you can read; clients use it with ATOLL_JOIN or "
        "--join. With --tenants, {tenant} in the name makes one file per tenant.",
        metavar="FILE",
    ),
]
HostJoinFile = Annotated[
    Path | None,
    typer.Option(
        "--host-join-file",
        help="Write the join token of hosts to this file. Anyone who has it can be a host of this cluster.",
        metavar="FILE",
    ),
]


@with_option_groups
def up(
    *,
    islands: StandingIslands = None,
    listen: Annotated[
        str,
        typer.Option(
            help="Address of the controller: unix:/path or HOST:PORT, with TLS on HOST:PORT. Defaults to a unix socket "
            "that only you can open, or on Ray to any free port.",
            metavar="ADDRESS",
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            help="HOST or HOST:PORT at which others reach the controller, for its join tokens. Several, separated by "
            "commas, are tried in turn. Defaults to --listen, or for 0.0.0.0 to this machine's address.",
            metavar="ADDRESS",
        ),
    ] = "",
    join_file: JoinFile = None,
    host_join_file: HostJoinFile = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            "--authority",
            help="Keep the cluster's authority and tokens in this file, which is created if it does not exist. The "
            "next cluster with this file has the same join tokens, so hosts with `--stay` find it. With `--engine "
            "ray`, a file on the controller's node.",
            metavar="FILE",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Disable TLS on HOST:PORT: tokens, programs and data travel unencrypted. Addresses other than "
            "loopback then need ATOLL_TOKEN. Clients need ATOLL_INSECURE=1.",
        ),
    ] = False,
    cluster: ClusterOptions,
    name: Annotated[str, typer.Option(help="Name of the cluster, for other commands.", metavar="NAME")] = DEFAULT_NAME,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            help="Keep a journal of the controller in this directory, which only you can read. A controller that exits "
            "or is killed is restarted and continues without losing state. With `--engine ray`, a directory on the "
            'controller\'s node. See the page "The journal".',
            metavar="DIRECTORY",
        ),
    ] = None,
    continues: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="If the --journal is that of a cluster whose controller and engine were killed, or whose machine was "
            "restarted, continue that cluster: its hosts and scripts wait for ATOLL_GRACE. Needs `--engine "
            "hosts`, and on TCP the same --authority.",
        ),
    ] = False,
    standby: Annotated[
        str,
        typer.Option(
            "--standby",
            help="Start a standby of the controller at this address, and no hosts. It needs its own --journal. The "
            "standby follows that controller, and takes over if it fails. On TCP, give the same --authority. With "
            "--continue, --leader-lease and --foreground, the two machines are equals: each follows the other one if "
            "that serves the cluster, and otherwise serves it itself. SIGTERM then leaves the cluster to the other.",
            metavar="ADDRESS",
        ),
    ] = "",
    lease: Annotated[
        str,
        typer.Option(
            "--leader-lease",
            help="Serve the cluster only while this controller holds the lease at this address: "
            "etcd://HOST:PORT[,HOST:PORT]/NAME, etcds://... with TLS, or kubernetes://NAMESPACE/NAME. Needs a "
            "--journal. Give the same to its --standby. Defaults to ATOLL_LEADER_LEASE.",
            metavar="ADDRESS",
        ),
    ] = "",
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground",
            help="Stay in the foreground. Ctrl-C ends the cluster. If the cluster fails, the exit status is 1.",
        ),
    ] = False,
) -> None:
    """Start a standing cluster, and print its address.

    Only the address goes to standard output. Your scripts on this machine use the cluster with ATOLL_ADDRESS=default,
    or with the name of --name. The cluster runs until `atoll down`. If this command ends while the cluster starts, the
    cluster ends as well. `atoll logs` shows its messages.

    For clients on other machines: `atoll up --listen 0.0.0.0:7000 --join-file join`, and there `ATOLL_JOIN=join`.
    """
    from atoll.operate.standing import StandingOptions, start_cluster
    from atoll.security.access import is_insecure
    from atoll.security.roles import Role
    from atoll.wire.address import parse_address

    settings = up_settings(islands, cluster)
    if islands is None and not settings.shapes and not standby and (unused := SETTINGS["islands"]).text():
        echo(f"{unused.variable} is only for embedded clusters: this cluster has the islands {settings.islands}")
    chosen = "" if name == DEFAULT_NAME else f" --name {name}"
    insecure = insecure or is_insecure()
    wanted = {Role.CLIENT: join_file, Role.HOST: host_join_file}
    if host_join_file is not None and settings.engine != "hosts":
        raise typer.BadParameter("--host-join-file is for `atoll host` on other machines: add --engine hosts")
    on_tcp = settings.engine == "ray" if not listen else not listen.startswith("unix:")
    files = [file for file in (*wanted.values(), authority) if file is not None]
    here = [file for file in files if file is not authority or settings.engine != "ray"]
    _check_join_files(files, here, secured=on_tcp and not insecure)
    lease = _checked_lease(lease, settings, journal)
    if standby:
        has_islands = (islands is not None or settings.engine != DEFAULT_ENGINE) and not continues
        standby = _checked_standby(standby, listen, has_islands, journal, authority, insecure)
    if continues:
        _check_continues(settings, journal, secured=on_tcp and not insecure, authority=authority)
    if standby and continues:
        _check_pair(lease, foreground=foreground)
    options = StandingOptions(
        name=name,
        settings=settings,
        listen=listen,
        token=token(),
        stays=not foreground,
        advertise=advertise,
        insecure=insecure,
        authority=authority,
        journal=journal,
        standby=standby,
        continues=continues,
        lease=lease,
    )

    def write_join_files(standing: StandingCluster | StandingOnRay) -> None:
        for role, file in wanted.items() if parse_address(standing.record.address).tls else ():
            join = standing.join_token(role)
            if file is not None:
                _write_join(join, file, standing, tenant_tokens(cluster) if role is Role.CLIENT else {})

    if standby and continues:
        _run_pair(options, write_join_files)
        return
    standing = start_cluster(options)
    try:
        write_join_files(standing)
        if settings.engine == "hosts":
            _echo_how_hosts_join(standing, host_join_file)
        if settings.engine != "local":
            echo(f"  look:  atoll status{chosen}")
        with terminal.status(f"starting {settings.islands if not standby else 'a standby'} ..."):
            standing.wait()
    except AtollError:
        messages = standing.last_messages()
        if messages:
            print(messages, file=sys.stderr)
        raise
    warnings = standing.warnings()
    if warnings:
        echo(f"messages of this start, which are also in `atoll logs{chosen}`:\n{warnings}")
    if not foreground:
        standing.leave()  # first, because a failure to print must not end the cluster
    print(standing.record.reached_at, flush=True)
    _echo_how_scripts_join(standing, options, join_file)
    if foreground:
        echo("  end:   Ctrl-C")
        _stay(standing, name)
    else:
        echo(f"  look:  atoll status{chosen}")
        echo(f"  end:   atoll down{chosen}")


def _echo_how_hosts_join(standing: StandingCluster | StandingOnRay, join_file: Path | None) -> None:
    from atoll.security.join_token import host_join_file
    from atoll.wire.address import parse_address

    how = f"--join {quote(str(join_file or host_join_file(standing.directory)))}"
    if not parse_address(standing.record.address).tls:
        how = f"--address {standing.record.reached_at} --insecure"
    echo(f"waiting for hosts: `atoll host {how}` on each machine")


def _echo_how_scripts_join(
    standing: StandingCluster | StandingOnRay, options: StandingOptions, client_join_file: Path | None
) -> None:
    from atoll.operate.standby_text import standby_title
    from atoll.security.join_token import join_file
    from atoll.wire.address import parse_address

    address, reached = parse_address(standing.record.address), quote(standing.record.reached_at)
    if options.standby:
        echo(f"{standby_title(options.name)} follows the controller at {options.standby}")
        echo(f"  run:   JAX_PLATFORMS=atoll ATOLL_ADDRESS={reached} python train.py, after it has taken over")
    else:
        settings = options.settings
        echo(f"cluster {options.name} is up: {settings.islands} on {', '.join(settings.topology.platforms)}")
        where = reached if settings.engine == "ray" else options.name
        echo(f"  run:   JAX_PLATFORMS=atoll ATOLL_ADDRESS={where} python train.py")
    if address.tls:
        file = str(client_join_file or join_file(standing.directory))
        source = "the file of its tenant" if TENANT_MARK in file else "that file"
        echo(f"         (on other machines, or as another user: ATOLL_JOIN={quote(file)}, a copy of {source})")
    elif not address.is_local:
        echo("         (on other machines: this machine's name in the address, the same ATOLL_TOKEN, ATOLL_INSECURE=1)")


def _stay(standing: StandingCluster | StandingOnRay, name: str) -> None:
    """Return when the cluster ends, or end it at Ctrl-C. Raise ClusterError if it fails."""
    end_on_signals()
    try:
        end = standing.wait_for_end()
    except KeyboardInterrupt:
        echo("ending")
    else:
        if not end.expected:
            raise ClusterError(f"cluster {name} has ended: {end.reason}")
        echo(f"cluster {name} has ended")
    finally:
        standing.end()


def _run_pair(options: StandingOptions, on_start: Callable[[StandingCluster | StandingOnRay], None]) -> None:
    """Follow the controller at `options.standby`, or serve the cluster, in turn, until somebody ends it."""
    from atoll.leadership.lease_address import open_lease
    from atoll.operate.controller_pair import ControllerPair

    last_text = ""

    def echo_problem(text: str) -> None:
        nonlocal last_text
        if text != last_text:  # attempts continue
            echo(text)
        last_text = text

    def on_up(standing: StandingCluster | StandingOnRay, follows: bool) -> None:
        print(standing.record.reached_at, flush=True)
        what = f"follows the controller at {options.standby}" if follows else "serves the cluster"
        echo_problem(f"{options.name} {what}")

    end_on_signals()
    try:
        end = ControllerPair(options, open_lease(options.lease), on_start, on_up, echo_problem).run()
    except KeyboardInterrupt:
        echo(f"leaving the cluster to {options.standby}")
    else:
        echo(f"cluster {options.name} has ended: {end.reason}")


def _check_pair(lease: str, *, foreground: bool) -> None:
    """End the command if the options do not allow two controllers that serve a cluster by turns."""
    if not lease:
        raise typer.BadParameter(
            "--standby with --continue: a lease decides which of the two machines serves; add --leader-lease ADDRESS, "
            "or remove --continue"
        )
    if not foreground:
        raise typer.BadParameter("--standby with --continue: the command follows and serves by turns; add --foreground")


def _checked_standby(
    standby: str,
    listen: str,
    has_islands: bool,
    journal: Path | None,
    authority: Path | None,
    insecure: bool,
) -> str:
    """Return the address of the controller to follow. Ends the command if the options do not allow a standby."""
    from atoll.wire.address import parse_address

    if has_islands:
        raise typer.BadParameter("--standby: a standby starts no hosts; remove --islands and --engine")
    if journal is None:
        raise typer.BadParameter("--standby: a standby needs its own journal; add --journal DIRECTORY")
    here, there = parse_address(listen or "unix:/"), parse_address(standby)
    if not here.is_unix or not there.is_unix:
        if insecure:
            raise typer.BadParameter("--standby: a standby on TCP needs TLS; remove --insecure")
        if authority is None and not AUTHORITY.text():
            raise typer.BadParameter("--standby: a standby on TCP needs the cluster's authority; add --authority FILE")
    return str(there.secured())


def _checked_lease(lease: str, settings: ClusterSettings, journal: Path | None) -> str:
    """Return the address of the lease, or "". Ends the command if the options do not allow it."""
    from atoll.leadership.lease_address import open_lease

    source, address = ("--leader-lease", lease) if lease else (LEADER_LEASE.variable, LEADER_LEASE.text())
    if not address:
        return ""
    try:
        open_lease(address)
    except LeaseError as error:
        raise typer.BadParameter(f"{source}: {error}") from None
    if journal is None:
        raise typer.BadParameter(
            f"{source}: only a standby or a restarted controller needs it; add --journal DIRECTORY"
        )
    if settings.engine == "ray":
        raise typer.BadParameter(f"{source}: Ray restarts the engine's actor, which has no standby; remove {source}")
    return address


def _check_continues(settings: ClusterSettings, journal: Path | None, *, secured: bool, authority: Path | None) -> None:
    """End the command if the options do not allow to continue a cluster."""
    if journal is None:
        raise typer.BadParameter("--continue: a cluster continues from its journal; add --journal DIRECTORY")
    if settings.engine != "hosts":
        raise typer.BadParameter("--continue: the workers of other engines end with it; add --engine hosts")
    if secured and authority is None and not AUTHORITY.text():
        raise typer.BadParameter("--continue: hosts trust the cluster's authority only; add --authority FILE")


def _check_join_files(files: list[Path], here: list[Path], *, secured: bool) -> None:
    """End the command, before a cluster starts, if the files cannot be written.

    `here` are those of the `files` that are on this machine.
    """
    if files and not secured:
        raise typer.BadParameter(
            "join files and authorities need a cluster on TCP with TLS: give --listen HOST:PORT or --engine ray, "
            "and remove --insecure"
        )
    for file in here:
        if not file.absolute().parent.is_dir():
            raise typer.BadParameter(f"cannot write {file}: the directory {file.absolute().parent} does not exist")


def _write_join(
    join: JoinToken, file: Path, standing: StandingCluster | StandingOnRay, tenants: dict[str, str]
) -> None:
    """Write the join token of clients.

    If {tenant} is in the file's name, write one file per tenant instead: for `default`, and for those in `tenants`,
    which maps names to tokens.
    """
    try:
        if TENANT_MARK not in file.name:
            join.save(file)
            return
        for tenant, secret in {DEFAULT_TENANT_NAME: join.token, **tenants}.items():
            replace(join, token=secret).save(file.with_name(file.name.replace(TENANT_MARK, tenant)))
    except OSError as error:
        standing.end()
        fail(f"cannot write {file}: {error.strerror}")


@with_option_groups
def status(
    as_json: AsJson = False,
    security: Annotated[
        bool,
        typer.Option(
            "--security",
            help="Show the mechanisms that confine users' Python on each host, and the reasons for missing ones. The "
            'JSON has them in "sandbox" of each host.',
        ),
    ] = False,
    *,
    cluster: RunningCluster,
) -> None:
    """Show the islands, hosts, devices and sessions of a cluster.

    The command addresses the first of these clusters: that of --address or --join, of --name, of ATOLL_ADDRESS or
    ATOLL_JOIN, the embedded one of the script that runs the command, the one named "default", or the only running one.
    The embedded cluster of process 123 has the name embedded-123.

    The JSON is `{"name", "address", "islands": [{"id", "state", "hosts": [{"id", "pid", "state", "devices": [...]}]}],
    "sessions": [...]}` and more. States are "starting", "ready", "restarting", "draining", "drained" and "removed".

    For a standby of this machine, shows whether it follows its controller. The JSON is `{"name", "address", "standby":
    {"controller", "state", "since", "reason", "has_copy"}}`, with the state "copying", "following" or "lost".
    """
    from atoll.operate.cluster_queries import other_clusters, report_of
    from atoll.operate.standby_text import standby_text
    from atoll.operate.status_tables import security_tables, status_tables
    from atoll.telemetry.snapshot import Snapshot

    target = cluster.find(standby=True)
    standby = target.standby
    if standby is not None and target.record is not None:
        if as_json:
            print_json(target, {"standby": msgspec.to_builtins(standby)})
        else:
            print("\n".join(standby_text(standby, target.record.name, target.reached_at, time.time())))
        return
    report = report_of(target, token())
    if as_json:
        print_json(target, report)
    else:
        snapshot = msgspec.convert(report, decodable(Snapshot))
        width = None if sys.stdout.isatty() else _TABLE_WIDTH
        title = target.record.title if target.record else ""
        tables = security_tables if security else status_tables
        Console(width=width, highlight=False).print(tables(snapshot, target.reached_at, title))
        others = other_clusters(target)
        if others:
            print("also up:", ", ".join(f"--name {each.name}" + each.title[len(each.name) :] for each in others))


@with_option_groups
def down(
    *,
    cluster: RunningCluster,
    ray_address: Annotated[
        str,
        typer.Option(
            help="End the cluster with that --name on this Ray cluster: HOST:PORT, ray://HOST:PORT, or auto for the "
            "Ray cluster of this machine. Also ends clusters that other users or machines started.",
            metavar="ADDRESS",
        ),
    ] = "",
    all_sessions: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also end sessions that are suspended on disk, and delete their files. Otherwise they can resume in "
            "the next cluster.",
        ),
    ] = False,
) -> None:
    """End a cluster.

    Returns when none of its processes, sockets and directories is left. Open sessions end with an error. If the cluster
    has a journal, sessions that are suspended on disk do not: their scripts wait, and `atoll resume` resumes them in
    the next cluster with that journal. A process of yours on this machine that does not exit within 10 seconds is
    killed. Addresses the same cluster as `atoll status`, but an embedded one only by its name or address. The cluster
    of a standby continues.
    """
    from atoll.operate.standby_text import standby_title
    from atoll.operate.standing import stop, stop_on_ray

    if ray_address:
        if cluster.address or cluster.join:
            raise typer.BadParameter("--ray-address finds the cluster by --name: remove --address and --join")
        name = cluster.name or DEFAULT_NAME
        with terminal.status("ending ..."):
            stop_on_ray(ray_address, name)
        print(f"cluster {name} on the Ray cluster at {ray_address} has ended")
        return
    target = cluster.find(embedded=False, standby=True)
    standby = target.standby
    label = f"cluster {target.record.name}" if target.record else "the cluster"
    if standby is not None and target.record is not None:
        label = standby_title(target.record.name)
    with terminal.status(f"ending {label} ..."):
        ended = stop(target, token(), all_sessions)
    text = f"{label} at {target.reached_at} has ended"
    if ended.processes >= 0:
        text += f": {counted(ended.processes, 'process')}"
    if ended.forced:
        text += f", {ended.forced} of them killed"
    if standby is not None:
        text += f"; the cluster at {standby.controller} continues without it"
    print(text)
    for line in ended.persisted:
        print(line)
    if all_sessions and not ended.controller_replied:
        fail(
            "the controller did not reply, so sessions that are suspended on disk were not ended: if the cluster had a "
            "--journal, start it again and repeat the command"
        )
