"""Who shares a cluster, and how much of it each may have: looked at and changed while programs run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from atoll.operate.command.command_options import ClusterAddress, ClusterJoin, ClusterName, token, with_option_groups

app = typer.Typer(name="tenants", invoke_without_command=True, rich_markup_mode="markdown")
_TABLE_WIDTH = 120


def _amount(text: str) -> int:
    from atoll.quantities import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Tenant = Annotated[str, typer.Argument(help="The tenant, by its name.", metavar="NAME")]


Count = Annotated[int | None, typer.Option(min=0, help="The most at a time; 0: no limit.", metavar="N")]


@dataclass(frozen=True)
class TenantOptions:
    """What a tenant may have; None where the user did not say."""

    share: Annotated[
        float | None, typer.Option(help="Of device time, relative to the shares of others of the same priority.")
    ] = None
    priority: Annotated[
        int | None,
        typer.Option(help="What a higher one wants goes before everything of a lower one that has not begun."),
    ] = None
    role: Annotated[str | None, typer.Option(help="user, or operator: who may do everything.", metavar="ROLE")] = None
    memory: Annotated[
        int | None,
        typer.Option(help="The most on each device, such as 8GiB; 0: no limit.", parser=_amount, metavar="AMOUNT"),
    ] = None
    total_memory: Annotated[
        int | None, typer.Option(help="The most on all devices together.", parser=_amount, metavar="AMOUNT")
    ] = None
    devices: Count = None
    sessions: Count = None
    launches: Count = None
    uploads: Count = None
    compiles: Count = None
    reserve: Annotated[
        int | None,
        typer.Option(min=0, max=50, help="Percent of device time that it gets although higher priorities have work."),
    ] = None
    launch_rate: Annotated[
        int | None, typer.Option(min=0, help="Launches per second while others have sessions; 0: no limit.")
    ] = None
    compile_seconds: Annotated[
        int | None,
        typer.Option(min=0, help="Seconds of compilations per minute while others have sessions; 0: no limit."),
    ] = None
    upload_rate: Annotated[
        int | None,
        typer.Option(
            help="Bytes sent per second while others have sessions, such as 1GiB; 0: no limit.",
            parser=_amount,
            metavar="AMOUNT",
        ),
    ] = None
    run_seconds: Annotated[
        int | None,
        typer.Option(min=0, help="The longest that one run may keep other tenants waiting, in seconds; 0: no limit."),
    ] = None

    @property
    def limits(self) -> dict[str, int]:
        """Those that were given."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and name not in ("share", "priority", "role")
        }


@app.callback()
def tenants(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON, for programs.")] = False,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """List the tenants of a cluster, with what they may have and what they have; change them.

    An operator sees all, a user its own. Which cluster: as for `atoll status`.
    """
    from rich.console import Console

    from atoll.operate.cluster_queries import find, report_of
    from atoll.operate.status_tables import tenants_table
    from atoll.telemetry.snapshot import Snapshot

    if context.invoked_subcommand is not None:
        return
    report = report_of(find(address, name, join), token())
    if as_json:
        print(json.dumps(report["tenants"], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH, highlight=False).print(
            tenants_table(msgspec.convert(report, Snapshot))
        )


@app.command("set")
@with_option_groups
def set_tenant(
    tenant: Tenant,
    *,
    wanted: TenantOptions,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Change a tenant, while programs run: what has not begun counts by the new values at once."""
    if wanted == TenantOptions():
        raise typer.BadParameter("nothing is to be changed: give --share, --priority, --role, or a limit")
    _say(tenant, wanted, address, name, join)


@app.command("add")
@with_option_groups
def add_tenant(
    tenant: Tenant,
    *,
    token_file: Annotated[
        Path, typer.Option(help="The file with the tenant's token. The cluster keeps a hash of it.", metavar="FILE")
    ],
    wanted: TenantOptions,
    address: ClusterAddress = "",
    name: ClusterName = "",
    join: ClusterJoin = "",
) -> None:
    """Let one more tenant use the cluster, from now until it ends or the tenant is removed."""
    from atoll.cluster.tenant_settings import check_tenant_name, read_token, token_hash

    check_tenant_name(tenant)
    hashed = token_hash(read_token(str(token_file.absolute()), Path(), f"tenant.{tenant}"))
    _say(tenant, wanted, address, name, join, token_hash=hashed, is_new=True)


@app.command("remove")
def remove_tenant(tenant: Tenant, address: ClusterAddress = "", name: ClusterName = "", join: ClusterJoin = "") -> None:
    """Let a tenant use the cluster no more: its sessions end."""
    from atoll.operate.cluster_queries import find, operate
    from atoll.protocol.messages import RemoveTenant

    print(operate(find(address, name, join), token(), RemoveTenant(tenant)))


def _say(tenant: str, wanted: TenantOptions, address: str, name: str, join: str, **said: Any) -> None:
    from atoll.operate.cluster_queries import find, operate
    from atoll.protocol.messages import SetTenant

    message = SetTenant(
        tenant, share=wanted.share, priority=wanted.priority, role=wanted.role, limits=wanted.limits, **said
    )
    print(operate(find(address, name, join), token(), message))
