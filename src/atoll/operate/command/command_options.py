"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
import typer

from atoll.cluster.cluster_file import FILE_VARIABLE, read_cluster_file
from atoll.cluster.processes.leases import LEASE_SECONDS
from atoll.cluster.settings import (
    DEFAULT_ENGINE,
    DEFAULT_ISLANDS,
    DEFAULT_PLATFORM,
    DEFAULT_POLICY,
    DEFAULT_RAY_STRATEGY,
    HOSTS_SECONDS,
    SUSPENDED_SECONDS,
    ClusterSettings,
    Dispatch,
    OnOff,
    SuspendLower,
    check_grants,
)
from atoll.cluster.tenant_settings import TENANTS_VARIABLE, read_tenant_tokens, read_tenants
from atoll.errors import AtollError
from atoll.protocol.messages import DEFAULT_TOKEN_VARIABLE
from atoll.quantities import parse_bytes

if TYPE_CHECKING:
    from atoll.operate.cluster_queries import Target


def _check_islands(text: str | None) -> str | None:
    from atoll.cluster.settings import read_topology

    return _checked(read_topology, text)


def _check_platform(text: str | None) -> str | None:
    from atoll.devices.device_kinds import check_platform

    return _checked(check_platform, text)


def _check_engine(text: str | None) -> str | None:
    from atoll.engines.engine_interface import check_engine

    return _checked(check_engine, text)


def _checked(check: Callable[[str], object], text: str | None) -> str | None:
    """Return the text if `check` accepts it or if it is None; otherwise end the command."""
    if text is not None:
        try:
            check(text)
        except AtollError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def _check_policy(text: str | None) -> str | None:
    from atoll.launch.policies import find_policy

    return _checked(find_policy, text)


def read_amount(text: str) -> int:
    """Return an amount of bytes, or end the command."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_ISLANDS_HELP = (
    "ISLANDSxHOSTSxDEVICES: 2x1x4 has two islands of one host with four devices. JAX sees them as 2 slices "
    "(`slice_index`) of 4 devices. 1x2x4+1x1x8 has two islands of different shapes."
)
_FILE_HELP = (
    "A TOML file with islands, which may differ in hosts, devices, platform and topology, and with settings named like "
    'these options, which override it; see the page "Clusters". Replaces --islands. Defaults to ATOLL_CLUSTER.'
)
_MEMORY_HELP = (
    "Memory of each device, such as 16GiB, if the platform does not report it (cpu) or reports too much. Work that "
    "does not fit waits, and work that can never fit fails. Defaults to ATOLL_DEVICE_MEMORY."
)
_PLATFORM_HELP = (
    "Platform of the workers: cpu, cuda, rocm or tpu, as JAX names it, or null for devices that compute nothing. "
    f"Defaults to ATOLL_PLATFORM, then to {DEFAULT_PLATFORM}."
)
_DISPATCH_HELP = (
    "Whether a launch is dispatched immediately (parallel), or after the previous one is enqueued. Defaults to "
    f"ATOLL_DISPATCH, then to {Dispatch.PARALLEL}."
)
_POLICY_HELP = (
    "Scheduling policy, which decides whose gang an island starts next. Defaults to ATOLL_POLICY, then to "
    f"{DEFAULT_POLICY}."
)
_TOPOLOGY_HELP = (
    "Mesh of an island's devices, such as 4x4 or 2x2x2, if the platform does not report it (cpu). Slices with a shape "
    "are parts of it. Defaults to ATOLL_TOPOLOGY, then to a line."
)
_ENGINE_HELP = (
    "Engine that starts the hosts: local (processes of this machine), hosts (machines that run `atoll host`) or ray (a "
    f"Ray cluster). Defaults to ATOLL_ENGINE, then to {DEFAULT_ENGINE}."
)
_RAY_ADDRESS_HELP = (
    "With --engine ray: address of the Ray cluster, HOST:PORT or ray://HOST:PORT. Defaults to ATOLL_RAY_ADDRESS, then "
    "to RAY_ADDRESS, then to the cluster of which this machine is a node."
)
_RAY_RESOURCES_HELP = (
    "With --engine ray: resources that a host requests of its node, such as CPU=8,GPU=4,rack=1, in place of the "
    "default: one CPU and its devices (GPU, TPU). Defaults to ATOLL_RAY_RESOURCES."
)
_RAY_LABELS_HELP = (
    "With --engine ray: labels that the nodes of hosts must have, such as ray.io/market-type=on-demand. Defaults to "
    "ATOLL_RAY_LABELS."
)
_RAY_STRATEGY_HELP = (
    "With --engine ray: placement of an island's hosts: STRICT_SPREAD, SPREAD, PACK or STRICT_PACK, as Ray names it. "
    f"Defaults to ATOLL_RAY_STRATEGY, then to {DEFAULT_RAY_STRATEGY}, which places each host on a separate node."
)
_LEASE_HELP = (
    "Seconds of silence after which a host or machine counts as lost; 3 or more. Defaults to ATOLL_LEASE, then to "
    f"{LEASE_SECONDS:.0f}."
)
_WAIT_HELP = (
    "Seconds to wait for all hosts at the start, and for new hosts of a failed island. Defaults to ATOLL_WAIT, then to "
    f"{HOSTS_SECONDS:.0f} with --engine hosts or ray, and to 120 without."
)
_SPILL_HELP = (
    "Memory of each host for spilled arrays, such as 8GiB: idle arrays, of lower priorities first, move there when "
    "other work lacks device memory. Defaults to ATOLL_SPILL, then to none."
)
_SUSPEND_LOWER_HELP = (
    "Whether a session is suspended for one of a higher priority that lacks memory or exclusive devices, and where its "
    "arrays go. Defaults to ATOLL_SUSPEND_LOWER, then to off."
)
_SUSPEND_DIRECTORY_HELP = (
    "Directory on each host for sessions that are suspended to disk. Defaults to ATOLL_SUSPEND_DIR, then to one in "
    "ATOLL_STATE_DIR or ~/.local/state/atoll."
)
_SUSPENDED_HELP = (
    "Seconds after `atoll down` for which scripts of sessions that are suspended on disk wait for the next cluster "
    f"with this --journal. Defaults to ATOLL_SUSPENDED, then to {SUSPENDED_SECONDS:.0f}, a day."
)
_PYTHON_READ_HELP = (
    "Directory on the hosts that Python of all tenants may read, such as a data set. Repeat the option for several. "
    'Only with --tenants; see the page "Security". Defaults to ATOLL_PYTHON_READ, separated by colons.'
)
_PYTHON_WRITE_HELP = (
    "Directory on the hosts that Python of all tenants may read and write, such as one for checkpoints. Repeat the "
    "option for several. Defaults to ATOLL_PYTHON_WRITE."
)
_PYTHON_NETWORK_HELP = (
    "Whether Python of users on the hosts may use the network. Without it, an island of several hosts cannot run such "
    "Python. Defaults to ATOLL_PYTHON_NETWORK, then to on."
)
_INSECURE_SANDBOX_HELP = (
    "Start a cluster with --tenants even if this system cannot protect the tenants' files from each other's Python. "
    "Defaults to ATOLL_INSECURE_SANDBOX=1."
)
_BULK_TLS_HELP = (
    "Whether data connections of a cluster on TCP use TLS, as its control connections do. Use off only on a trusted "
    "network: arrays then travel unencrypted. Defaults to ATOLL_BULK_TLS, then to on."
)
_TENANTS_HELP = (
    "A TOML file with the tenants that share the cluster: their tokens, shares, priorities, quotas and roles; see the "
    'page "Sharing". Defaults to ATOLL_TENANTS. Without it, there is one tenant.'
)

Islands = Annotated[
    str | None,
    typer.Option(help=f"{_ISLANDS_HELP} Give this or --cluster.", callback=_check_islands, metavar="IxHxD"),
]
EmbeddedIslands = Annotated[
    str | None,
    typer.Option(
        help=f"Islands of an embedded cluster. {_ISLANDS_HELP} Defaults to ATOLL_ISLANDS, then to {DEFAULT_ISLANDS}.",
        callback=_check_islands,
        metavar="IxHxD",
    ),
]


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a new cluster, named like the fields of `ClusterSettings`; None if not given."""

    cluster_file: Annotated[Path | None, typer.Option("--cluster", help=_FILE_HELP, metavar="FILE")] = None
    platform: Annotated[str | None, typer.Option(help=_PLATFORM_HELP, callback=_check_platform)] = None
    device_memory: Annotated[
        int | None, typer.Option("--device-memory", help=_MEMORY_HELP, parser=read_amount, metavar="AMOUNT")
    ] = None
    dispatch: Annotated[Dispatch | None, typer.Option(help=_DISPATCH_HELP)] = None
    policy: Annotated[str | None, typer.Option(help=_POLICY_HELP, callback=_check_policy, metavar="NAME")] = None
    tenants_file: Annotated[Path | None, typer.Option("--tenants", help=_TENANTS_HELP, metavar="FILE")] = None
    mesh: Annotated[str | None, typer.Option("--topology", help=_TOPOLOGY_HELP, metavar="MESH")] = None
    engine: Annotated[str | None, typer.Option(help=_ENGINE_HELP, callback=_check_engine)] = None
    lease_seconds: Annotated[float | None, typer.Option("--lease", help=_LEASE_HELP, metavar="SECONDS")] = None
    wait_seconds: Annotated[float | None, typer.Option("--wait", min=1.0, help=_WAIT_HELP, metavar="SECONDS")] = None
    bulk_tls: Annotated[OnOff | None, typer.Option("--bulk-tls", help=_BULK_TLS_HELP)] = None
    ray_address: Annotated[str | None, typer.Option(help=_RAY_ADDRESS_HELP, metavar="ADDRESS")] = None
    ray_resources: Annotated[str | None, typer.Option(help=_RAY_RESOURCES_HELP, metavar="NAME=AMOUNT,...")] = None
    ray_labels: Annotated[str | None, typer.Option(help=_RAY_LABELS_HELP, metavar="NAME=VALUE,...")] = None
    ray_strategy: Annotated[str | None, typer.Option(help=_RAY_STRATEGY_HELP, metavar="STRATEGY")] = None
    spill: Annotated[int | None, typer.Option(help=_SPILL_HELP, parser=read_amount, metavar="AMOUNT")] = None
    suspend_lower: Annotated[SuspendLower | None, typer.Option(help=_SUSPEND_LOWER_HELP)] = None
    suspend_directory: Annotated[str | None, typer.Option(help=_SUSPEND_DIRECTORY_HELP, metavar="DIR")] = None
    suspended_seconds: Annotated[
        float | None, typer.Option("--suspended", min=1.0, help=_SUSPENDED_HELP, metavar="SECONDS")
    ] = None
    python_read: Annotated[list[str] | None, typer.Option(help=_PYTHON_READ_HELP, metavar="DIR")] = None
    python_write: Annotated[list[str] | None, typer.Option(help=_PYTHON_WRITE_HELP, metavar="DIR")] = None
    python_network: Annotated[OnOff | None, typer.Option(help=_PYTHON_NETWORK_HELP)] = None
    insecure_sandbox: Annotated[
        bool | None, typer.Option("--insecure-sandbox", help=_INSECURE_SANDBOX_HELP, show_default=False)
    ] = None


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each keyword argument that is a dataclass by one option per field of it.

    Typer reads options from a function's signature, in which one parameter cannot stand for several.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for each in signature(command).parameters.values():
        if each.name not in groups:
            parameters.append(each.replace(annotation=hints[each.name]))
            continue
        options = get_type_hints(groups[each.name], include_extras=True)
        parameters += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name])
            for field in fields(groups[each.name])
        ]

    @wraps(command)
    def with_each(**given: Any) -> None:
        made = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group)}) for name, group in groups.items()
        }
        command(**made, **given)

    with_each.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    with_each.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_each


ClusterAddress = Annotated[
    str,
    typer.Option("--address", help="Address of the cluster: unix:/path or HOST:PORT. Defaults to ATOLL_ADDRESS."),
]
ClusterJoin = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="FILE",
        help="File with the cluster's join token, which `atoll up --join-file FILE` writes, or the token itself. Other "
        "users see a command line, so prefer a file. Your own clusters on this machine need no join token. Defaults to "
        "ATOLL_JOIN.",
    ),
]
ClusterName = Annotated[
    str, typer.Option("--name", help="Name of the cluster, as of `atoll up --name`, or embedded-PID for a script's.")
]


@dataclass(frozen=True)
class ClusterChoice:
    """The options that choose a running cluster."""

    address: ClusterAddress = ""
    name: ClusterName = ""
    join: ClusterJoin = ""

    def find(self, *, embedded: bool = True) -> Target:
        """Return the cluster, as `cluster_queries.find` does."""
        from atoll.operate.cluster_queries import find

        return find(self.address, self.name, self.join, embedded=embedded)


def check_one_of(islands: str | None, address: str, join: str) -> None:
    """End the command if it has options both of an embedded cluster and of a running one."""
    if islands is not None and (address or join):
        given = "--address" if address else "--join"
        raise typer.BadParameter(
            f"--islands starts an embedded cluster, {given} uses a running one: give only one of them"
        )


def given(islands: str | None, cluster: ClusterOptions) -> dict[str, Any]:
    """Return the values that the user gave, by the field names of `ClusterSettings`."""
    said = {name: value for name, value in {"islands": islands, **vars(cluster)}.items() if value is not None}
    if islands is not None and "cluster_file" in said:
        raise typer.BadParameter("--islands and --cluster both define islands: give only one")
    return said


def settings_of(islands: str | None, cluster: ClusterOptions) -> ClusterSettings:
    """Return the settings of a new cluster, from the options and then from the environment. Raises ClusterError."""
    said, settings = given(islands, cluster), ClusterSettings.from_environment()
    file = said.pop("cluster_file", None) or os.environ.get(FILE_VARIABLE, "")
    said.pop("tenants_file", None)
    for name in ("python_read", "python_write"):
        if name in said:
            said[name] = check_grants(f"--{name.replace('_', '-')}", tuple(said[name]))
    tenants = tenants_file(cluster)
    if tenants is not None:
        said["tenants"] = read_tenants(tenants)
    if file and islands is None:
        return read_cluster_file(file, settings, said)
    return msgspec.structs.replace(settings, **said)


def tenants_file(cluster: ClusterOptions) -> Path | None:
    """Return the file of tenants, from the options or the environment."""
    named = os.environ.get(TENANTS_VARIABLE, "")
    return cluster.tenants_file or (Path(named) if named else None)


def tenant_tokens(cluster: ClusterOptions) -> dict[str, str]:
    """Return the tokens in the file of tenants, by name. Raises SettingsError."""
    file = tenants_file(cluster)
    return read_tenant_tokens(file) if file is not None else {}


def up_settings(islands: str | None, cluster: ClusterOptions) -> ClusterSettings:
    """Return the settings of a standing cluster: as `settings_of`, but without ATOLL_ISLANDS."""
    settings = settings_of(islands, cluster)
    return settings if settings.shapes or islands else msgspec.structs.replace(settings, islands=DEFAULT_ISLANDS)


def token() -> str:
    """Return the token of the environment, or ""."""
    return os.environ.get(DEFAULT_TOKEN_VARIABLE, "")
