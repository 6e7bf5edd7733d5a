"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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


def _check_islands(text: str | None) -> str | None:
    from atoll.cluster.settings import read_topology

    return _checked(read_topology, text)


def _check_platform(text: str | None) -> str | None:
    from atoll.devices.device_kinds import check_platform

    return _checked(check_platform, text)


def _check_engine(text: str | None) -> str | None:
    from atoll.engines.engine_kinds import check_engine

    return _checked(check_engine, text)


def _checked(check: Callable[[str], object], text: str | None) -> str | None:
    """The text, if there is one; ends the command where `check` raises."""
    if text is not None:
        try:
            check(text)
        except AtollError as error:
            raise typer.BadParameter(str(error)) from None
    return text


def _check_policy(text: str | None) -> str | None:
    from atoll.scheduling.policies import find_policy

    return _checked(find_policy, text)


def _memory(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_ISLANDS_HELP = (
    "ISLANDSxHOSTSxDEVICES: 2x1x4 has two islands, of one host with four devices each. JAX sees them as "
    "2 slices (`slice_index`) of 4 devices. 1x2x4+1x1x8 has two islands that differ."
)
_FILE_HELP = (
    "A file in TOML with islands that may differ in hosts, devices, platform and topology, and with settings of the "
    'names of these options: see the page "Clusters". In place of --islands; other options count more. ATOLL_CLUSTER '
    "if not given."
)
_MEMORY_HELP = (
    "The memory of each device, such as 16GiB, where the platform does not report it (cpu) or reports too much. What "
    "does not fit waits, and what can never fit fails. ATOLL_DEVICE_MEMORY if not given."
)
_PLATFORM_HELP = (
    "What the workers compute on: cpu, cuda, rocm or tpu, as JAX names it, or null for devices that compute nothing. "
    f"ATOLL_PLATFORM if not given, else {DEFAULT_PLATFORM}."
)
_DISPATCH_HELP = (
    "Whether a launch is dispatched at once, or when the one before it is enqueued. ATOLL_DISPATCH if not given, "
    f"else {Dispatch.PARALLEL}."
)
_POLICY_HELP = (
    "The scheduling policy: which session's gang an island starts next. ATOLL_POLICY if not given, else "
    f"{DEFAULT_POLICY}."
)
_TOPOLOGY_HELP = (
    "The mesh that the devices of an island form, such as 4x4 or 2x2x2, where the platform does not report it (cpu): "
    "slices with a shape are parts of it. ATOLL_TOPOLOGY if not given, else a line."
)
_ENGINE_HELP = (
    "What starts the hosts of the cluster: local, processes of this machine; hosts, whoever runs `atoll host` on "
    f"others; or ray, a Ray cluster. ATOLL_ENGINE if not given, else {DEFAULT_ENGINE}."
)
_RAY_ADDRESS_HELP = (
    "With --engine ray: the Ray cluster, HOST:PORT or ray://HOST:PORT. ATOLL_RAY_ADDRESS if not given, else "
    "RAY_ADDRESS, else the one of which this machine is a node."
)
_RAY_RESOURCES_HELP = (
    "With --engine ray: what a host asks of its node, such as CPU=8,GPU=4,rack=1. One CPU and its devices (GPU, TPU), "
    "as far as this does not say otherwise. ATOLL_RAY_RESOURCES if not given."
)
_RAY_LABELS_HELP = (
    "With --engine ray: labels that a host's node has, such as ray.io/market-type=on-demand. ATOLL_RAY_LABELS if not "
    "given."
)
_RAY_STRATEGY_HELP = (
    "With --engine ray: how the hosts of an island lie: STRICT_SPREAD, SPREAD, PACK or STRICT_PACK, as Ray names it. "
    f"ATOLL_RAY_STRATEGY if not given, else {DEFAULT_RAY_STRATEGY}, each on a node of its own."
)
_LEASE_HELP = (
    "For how many seconds a host, or a machine, may be silent until it counts as lost; 3 or more. ATOLL_LEASE if not "
    f"given, else {LEASE_SECONDS:.0f}."
)
_WAIT_HELP = (
    "Seconds that the start waits for all hosts to be up, and a failed island for new ones. ATOLL_WAIT if not given, "
    f"else {HOSTS_SECONDS:.0f} with --engine hosts or ray, and 120 without."
)
_SPILL_HELP = (
    "How much of each host's memory idle arrays may take, such as 8GiB, when others lack device memory: those of a "
    "lower priority first, any rather than that something fails. ATOLL_SPILL if not given, else none."
)
_SUSPEND_LOWER_HELP = (
    "Whether a session is suspended for one of a higher priority that lacks memory or exclusive devices, and where its "
    "arrays go meanwhile. ATOLL_SUSPEND_LOWER if not given, else off."
)
_SUSPEND_DIRECTORY_HELP = (
    "Where each host keeps sessions that are suspended to disk. ATOLL_SUSPEND_DIR if not given, else in "
    "ATOLL_STATE_DIR, or ~/.local/state/atoll."
)
_SUSPENDED_HELP = (
    "For how many seconds after `atoll down` scripts wait whose sessions are suspended on disk, for the next cluster "
    f"with this --journal to resume them. ATOLL_SUSPENDED if not given, else {SUSPENDED_SECONDS:.0f}, a day."
)
_PYTHON_READ_HELP = (
    "A directory of the hosts that Python of all tenants may read there, such as a data set; repeat the option for "
    'several. Only with --tenants: see the page "Security". ATOLL_PYTHON_READ if not given, separated by colons.'
)
_PYTHON_WRITE_HELP = (
    "A directory of the hosts that Python of all tenants may read and write there, such as one for checkpoints; repeat "
    "the option for several. ATOLL_PYTHON_WRITE if not given."
)
_PYTHON_NETWORK_HELP = (
    "Whether Python of users on the hosts may use the network. Without one, an island of several hosts cannot run it. "
    "ATOLL_PYTHON_NETWORK if not given, else on."
)
_INSECURE_SANDBOX_HELP = (
    "Start a cluster with --tenants even if this system cannot keep the tenants' Python from each other's files. "
    "ATOLL_INSECURE_SANDBOX=1 if not given."
)
_BULK_TLS_HELP = (
    "Whether data connections of a cluster on TCP are with TLS, as its control connections are. off is for networks "
    "that nobody else reads: what is computed with then travels in the clear. ATOLL_BULK_TLS if not given, else on."
)

Islands = Annotated[
    str | None,
    typer.Option(help=f"{_ISLANDS_HELP} This or --cluster.", callback=_check_islands, metavar="IxHxD"),
]
EmbeddedIslands = Annotated[
    str | None,
    typer.Option(
        help=f"Of an embedded cluster; ATOLL_ISLANDS if not given, else {DEFAULT_ISLANDS}. {_ISLANDS_HELP}",
        callback=_check_islands,
        metavar="IxHxD",
    ),
]


_TENANTS_HELP = (
    "A file in TOML with the tenants who share the cluster: their tokens, shares, priorities, quotas and roles; see "
    'the page "Sharing". ATOLL_TENANTS if not given, else there is one tenant.'
)


@dataclass(frozen=True)
class ClusterOptions:
    """What a cluster is to have, in the words of `ClusterSettings`; None where the user did not say."""

    cluster_file: Annotated[Path | None, typer.Option("--cluster", help=_FILE_HELP, metavar="FILE")] = None
    platform: Annotated[str | None, typer.Option(help=_PLATFORM_HELP, callback=_check_platform)] = None
    device_memory: Annotated[
        int | None, typer.Option("--device-memory", help=_MEMORY_HELP, parser=_memory, metavar="AMOUNT")
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
    spill: Annotated[int | None, typer.Option(help=_SPILL_HELP, parser=_memory, metavar="AMOUNT")] = None
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
    """For a command with keyword arguments that are dataclasses, whose fields are options of their own on its line.

    Typer finds options in a function's signature, where one parameter cannot stand for several.
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
    typer.Option(
        "--address", help="The cluster at this address (unix:/path or HOST:PORT). ATOLL_ADDRESS if not given."
    ),
]
ClusterJoin = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="FILE",
        help="The cluster of this join token, or of the file that has it (`atoll up --join-file FILE` writes one). "
        "This user's own on this machine need none. Others see a command line: a file is better. ATOLL_JOIN if not "
        "given.",
    ),
]
ClusterName = Annotated[
    str, typer.Option("--name", help="The cluster of this name: of `atoll up --name`, or embedded-PID for a script's.")
]


def check_one_of(islands: str | None, address: str, join: str) -> None:
    """Ends the command where both an embedded cluster and another one are given."""
    if islands is not None and (address or join):
        given = "--address" if address else "--join"
        raise typer.BadParameter(f"--islands is for an embedded cluster, {given} for one that is up: give one")


def given(islands: str | None, cluster: ClusterOptions) -> dict[str, Any]:
    """What the user gave, by the names that `ClusterSettings` has for it."""
    said = {name: value for name, value in {"islands": islands, **vars(cluster)}.items() if value is not None}
    if islands is not None and "cluster_file" in said:
        raise typer.BadParameter("--islands and --cluster say both which islands there are: give one")
    return said


def settings_of(islands: str | None, cluster: ClusterOptions) -> ClusterSettings:
    """The cluster of these options, and of the environment where one is None. Raises ClusterError."""
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
    """That of these options, or of the environment."""
    named = os.environ.get(TENANTS_VARIABLE, "")
    return cluster.tenants_file or (Path(named) if named else None)


def tenant_tokens(cluster: ClusterOptions) -> dict[str, str]:
    """Of the file of tenants of these options, or of the environment. Raises SettingsError."""
    file = tenants_file(cluster)
    return read_tenant_tokens(file) if file is not None else {}


def up_settings(islands: str | None, cluster: ClusterOptions) -> ClusterSettings:
    """The same for a cluster that stays: ATOLL_ISLANDS is for embedded ones."""
    settings = settings_of(islands, cluster)
    return settings if settings.shapes or islands else msgspec.structs.replace(settings, islands=DEFAULT_ISLANDS)


def token() -> str:
    """The token of the environment, or ""."""
    return os.environ.get(DEFAULT_TOKEN_VARIABLE, "")
