"""The tenants of a cluster and their usage: `atoll tenants`, `atoll usage`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from atoll.cluster.usage.usage_records import By
from atoll.decodable import decodable
from atoll.operate.command.command_help import HelpCommand, HelpGroup
from atoll.operate.command.command_options import (
    RunningCluster,
    read_amount,
    read_time_span,
    token,
    with_option_groups,
)
from atoll.operate.command.terminal import fail

app = typer.Typer(name="tenants", cls=HelpGroup, invoke_without_command=True, rich_markup_mode=None)
_NO_LIMITS = ("share", "priority", "role", "native_code", "publish", "subscribe")  # among the options
_TENANTS_WIDTH, _USAGE_WIDTH = 120, 140  # without a terminal


Tenant = Annotated[str, typer.Argument(help="Name of the tenant.", metavar="NAME")]
JoinFile = Annotated[
    Path | None,
    typer.Option(
        "--join-file",
        help="Write the tenant's join token to this file, which only you can read; its clients use it with ATOLL_JOIN "
        "or --join. {tenant} in the name stands for the tenant's name.",
        metavar="FILE",
    ),
]
Count = Annotated[int | None, typer.Option(min=0, help="Limit at a time; 0: no limit.", metavar="N")]


@dataclass(frozen=True)
class TenantOptions:
    """The settings of a tenant; None if not given."""

    share: Annotated[
        float | None,
        typer.Option(help="Share of device time, relative to tenants of the same priority.", metavar="SHARE"),
    ] = None
    priority: Annotated[
        int | None,
        typer.Option(help="Priority. Work of a higher one goes before all waiting work of a lower one.", metavar="N"),
    ] = None
    role: Annotated[str | None, typer.Option(help="user, or operator, who may do everything.", metavar="ROLE")] = None
    memory: Annotated[
        int | None,
        typer.Option(help="Memory limit per device, such as 8GiB; 0: no limit.", parser=read_amount, metavar="AMOUNT"),
    ] = None
    total_memory: Annotated[
        int | None, typer.Option(help="Memory limit for all devices together.", parser=read_amount, metavar="AMOUNT")
    ] = None
    disk: Annotated[
        int | None,
        typer.Option(help="Limit of the files of its published arrays.", parser=read_amount, metavar="AMOUNT"),
    ] = None
    devices: Count = None
    sessions: Count = None
    launches: Count = None
    uploads: Count = None
    compiles: Count = None
    reserve: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=50,
            help="Percentage of device time that is reserved against work of higher priorities, at most 50.",
            metavar="PERCENTAGE",
        ),
    ] = None
    launch_rate: Annotated[
        int | None,
        typer.Option(min=0, help="Limit of launches per second while others have sessions; 0: no limit.", metavar="N"),
    ] = None
    compile_seconds: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Limit of compilation seconds per minute while others have sessions; 0: no limit.",
            metavar="SECONDS",
        ),
    ] = None
    upload_rate: Annotated[
        int | None,
        typer.Option(
            help="Limit of bytes sent per second while others have sessions, such as 1GiB; 0: no limit.",
            parser=read_amount,
            metavar="AMOUNT",
        ),
    ] = None
    run_seconds: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seconds that one run may keep other tenants waiting; 0: no limit.", metavar="SECONDS"
        ),
    ] = None
    native_code: Annotated[
        bool | None,
        typer.Option(
            "--native-code/--no-native-code",
            help="Let its scripts load shared libraries with FFI handlers into workers, where they can do anything.",
        ),
    ] = None
    publish: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of the names under which its scripts may publish arrays, such as 'policy*'. Repeat the "
            "option for several patterns. '' permits none.",
            metavar="PATTERN",
        ),
    ] = None
    subscribe: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of the arrays of other tenants that its scripts may read, such as 'trainer/policy*'. Repeat "
            "the option for several patterns. '' permits none.",
            metavar="PATTERN",
        ),
    ] = None

    @property
    def limits(self) -> dict[str, int]:
        """The given limits, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None and name not in _NO_LIMITS}


@app.callback()
@with_option_groups
def tenants(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    cluster: RunningCluster,
) -> None:
    """List the tenants of a cluster, or change them.

    The list has their settings and usage. Operators see all tenants, users their own. Addresses the same cluster as
    `atoll status`.
    """
    from rich.console import Console

    from atoll.operate.cluster_queries import report_of
    from atoll.operate.status_tables import tenants_table
    from atoll.telemetry.snapshot import Snapshot

    if context.invoked_subcommand is not None:
        return
    report = report_of(cluster.find(), token())
    if as_json:
        print(json.dumps(report["tenants"], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else _TENANTS_WIDTH, highlight=False).print(
            tenants_table(msgspec.convert(report, decodable(Snapshot)))
        )


@app.command("set", cls=HelpCommand)
@with_option_groups
def set_tenant(
    tenant: Tenant,
    *,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a new token, which replaces the present one for new connections. Open sessions continue.",
            metavar="FILE",
        ),
    ] = None,
    join_file: JoinFile = None,
    wanted: TenantOptions,
    cluster: RunningCluster,
) -> None:
    """Change a tenant while programs run.

    New values apply immediately to waiting work.
    """
    if join_file is not None and token_file is None:
        raise typer.BadParameter("--join-file: the cluster has only the hash of the token; add --token-file FILE")
    if wanted == TenantOptions() and token_file is None:
        raise typer.BadParameter(
            "nothing to change: give --share, --priority, --role, --token-file, --publish, --subscribe, or a limit"
        )
    _change(cluster, tenant, wanted, token_file, join_file)


@app.command("add", cls=HelpCommand)
@with_option_groups
def add_tenant(
    tenant: Tenant,
    *,
    token_file: Annotated[
        Path, typer.Option(help="File with the tenant's token, of which the cluster keeps a hash.", metavar="FILE")
    ],
    join_file: JoinFile = None,
    wanted: TenantOptions,
    cluster: RunningCluster,
) -> None:
    """Add a tenant to a running cluster.

    It exists until the cluster ends or the tenant is removed. To keep it, also write it to the file of --tenants.
    """
    from atoll.cluster.tenant_settings import check_tenant_name

    check_tenant_name(tenant)
    _change(cluster, tenant, wanted, token_file, join_file, is_new=True)


@app.command("remove", cls=HelpCommand)
@with_option_groups
def remove_tenant(tenant: Tenant, *, cluster: RunningCluster) -> None:
    """Remove a tenant, which ends its sessions.

    It can no longer use the cluster.
    """
    from atoll.operate.cluster_queries import operate
    from atoll.protocol.messages import RemoveTenant

    print(operate(cluster.find(), token(), RemoveTenant(tenant)))


def _change(
    cluster: RunningCluster,
    tenant: str,
    wanted: TenantOptions,
    token_file: Path | None = None,
    join_file: Path | None = None,
    *,
    is_new: bool = False,
) -> None:
    """Send the changes. If `join_file` is given, then write the join token with the token of `token_file` to it."""
    from atoll.cluster.tenant_settings import TENANT_MARK, read_token, token_hash
    from atoll.operate.cluster_queries import operate
    from atoll.operate.joining import join_token_with
    from atoll.protocol.messages import SetTenant

    target, join = cluster.find(), None
    secret = read_token(str(token_file.absolute()), Path(), f"tenant.{tenant}") if token_file is not None else ""
    if join_file is not None:
        join_file = join_file.with_name(join_file.name.replace(TENANT_MARK, tenant))
        join = join_token_with(secret, target.record, target.join)
        if join is None:
            raise typer.BadParameter(f"--join-file: the cluster at {target.address} has no TLS, so no join tokens")
        if not join_file.absolute().parent.is_dir():
            raise typer.BadParameter(f"cannot write {join_file}: the directory does not exist")
    message = SetTenant(
        tenant,
        is_new,
        token_hash(secret) if secret else "",
        share=wanted.share,
        priority=wanted.priority,
        role=wanted.role,
        limits=wanted.limits,
        native_code=wanted.native_code,
        publish=_patterns(wanted.publish),
        subscribe=_patterns(wanted.subscribe),
    )
    print(operate(target, token(), message))
    if join is not None and join_file is not None:
        try:
            join.save(join_file)
        except OSError as error:
            fail(f"the tenant has its token, but the command cannot write {join_file}: {error.strerror}")


def _patterns(given: list[str] | None) -> tuple[str, ...] | None:
    """Return the patterns without empty ones, which only replace the former patterns."""
    return tuple(filter(None, given)) if given else None


@with_option_groups
def usage(
    by: Annotated[By, typer.Option(help="Grouping of the sums.")] = By.TENANT,
    since: Annotated[
        str,
        typer.Option(
            help="Time span until now, such as 90s, 10m, 1h, 7d or 4w. Defaults to all records.", metavar="TIME"
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    cluster: RunningCluster,
) -> None:
    """Show the usage of a cluster by tenant, session or program.

    The usage is device time, memory over time, bytes moved and compilation time. Operators see all usage and the idle
    device time, users their own usage. Records outlive a cluster, and the next cluster with the same name continues
    them. Addresses the same cluster as `atoll status`.
    """
    from rich.console import Console

    from atoll.operate.cluster_queries import usage_of
    from atoll.operate.status_tables import usage_table

    seconds = read_time_span(since)
    found = usage_of(cluster.find(), token(), by, seconds)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else _USAGE_WIDTH, highlight=False).print(usage_table(found))
