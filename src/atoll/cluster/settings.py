"""The settings of a cluster, which are chosen when it starts.

One record passes from the command or the client through the engine to the controller, and into its event log.

To add a setting, add its field to `ClusterSettings`, its environment variable to `VARIABLES` and `from_environment`,
its option to `operate.command.command_options.ClusterOptions`, its key to `cluster_file`, its flag to
`operate.command.manifests`, and a row to docs/reference/settings.md and to tests/operate/cluster_options.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from atoll.cluster.former_names import environment_variable
from atoll.cluster.mesh import parse_mesh
from atoll.cluster.processes.leases import LEASE_SECONDS
from atoll.cluster.sandbox.grants import check_grant
from atoll.cluster.tenant_settings import TenantSettings
from atoll.cluster.topology import IslandShape, Topology, make_topology
from atoll.errors import SettingsError
from atoll.quantities import parse_bytes

DEFAULT_ISLANDS = "1x1x8"
DEFAULT_PLATFORM = "cpu"
DEFAULT_ENGINE = "local"
DEFAULT_POLICY = "fair"
DEFAULT_RAY_STRATEGY = "STRICT_SPREAD"
GRACE_SECONDS = 60.0  # for peers to reconnect to the next controller, if a controller has a journal
SUSPENDED_SECONDS = 86400.0
HOSTS_SECONDS = 600.0  # for the hosts of an island to join, if the engine does not start them
RELAY_GROUP = 16
NULL_PLATFORM = "null"  # devices that take a given time and compute nothing: see `devices.null`

# The environment variable of each setting.
VARIABLES = {
    "islands": "ATOLL_ISLANDS",
    "platform": "ATOLL_PLATFORM",
    "device_memory": "ATOLL_DEVICE_MEMORY",
    "dispatch": "ATOLL_DISPATCH",
    "policy": "ATOLL_POLICY",
    "mesh": "ATOLL_TOPOLOGY",
    "engine": "ATOLL_ENGINE",
    "lease_seconds": "ATOLL_LEASE",
    "wait_seconds": "ATOLL_WAIT",
    "grace_seconds": "ATOLL_GRACE",
    "bulk_tls": "ATOLL_BULK_TLS",
    "relay_group": "ATOLL_RELAY_GROUP",
    "ray_address": "ATOLL_RAY_ADDRESS",
    "ray_resources": "ATOLL_RAY_RESOURCES",
    "ray_labels": "ATOLL_RAY_LABELS",
    "ray_strategy": "ATOLL_RAY_STRATEGY",
    "suspend_directory": "ATOLL_SUSPEND_DIR",
    "suspend_lower": "ATOLL_SUSPEND_LOWER",
    "suspended_seconds": "ATOLL_SUSPENDED",
    "spill": "ATOLL_SPILL",
    "python_read": "ATOLL_PYTHON_READ",
    "python_write": "ATOLL_PYTHON_WRITE",
    "python_network": "ATOLL_PYTHON_NETWORK",
    "insecure_sandbox": "ATOLL_INSECURE_SANDBOX",
}


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise SettingsError if `name` is not in `known`, such as a table of platforms, policies or engines."""
    if name not in known:
        raise SettingsError(f"there is no {what} {name!r}; the known ones are: {', '.join(known)}")


def read_topology(text: str, mesh: str = "") -> Topology:
    """Parse the topology of a cluster. Raise SettingsError for invalid text or a mesh that does not fit its islands."""
    return ClusterSettings(text, mesh=mesh).topology


def parse_seconds(text: str, what: str) -> float:
    """Parse a time in seconds, 0 for "". Raise a SettingsError that names the setting `what`."""
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingsError(f"{what} is {text!r}: expected a number of seconds")
    return seconds


class Dispatch(StrEnum):
    """Whether gangs are dispatched before earlier gangs are enqueued: see `launch.sequential`."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


class OnOff(StrEnum):
    ON = "on"
    OFF = "off"


class SuspendLower(StrEnum):
    """Whether a session of higher priority that lacks memory or devices suspends others, and to which storage."""

    OFF = "off"
    MEMORY = "memory"
    DISK = "disk"


class ClusterSettings(msgspec.Struct, frozen=True):
    """The settings of a cluster."""

    islands: str = DEFAULT_ISLANDS  # ISLANDSxHOSTSxDEVICES, or several of these joined by +
    platform: str = DEFAULT_PLATFORM  # of the workers, as JAX names it
    device_memory: int = 0  # bytes per device; 0 for what the platform reports
    dispatch: Dispatch = Dispatch.PARALLEL
    policy: str = DEFAULT_POLICY  # for scheduling: a name of `launch.policies`
    lease_seconds: float = LEASE_SECONDS  # for which a worker may be silent
    max_sessions: int = 256
    abandoned_seconds: float = 30.0  # for runs of a closed session to end, before their island restarts
    mesh: str = ""  # of an island's devices, such as 4x4, if the platform has no coordinates; "" for a line
    engine: str = DEFAULT_ENGINE  # a name of `engines.engine_interface.ENGINES`
    wait_seconds: float = 0.0  # for an island to be up, including the arrival of hosts; 0 for the engine's default
    grace_seconds: float = 0.0  # for a peer or the controller to reconnect before it counts as lost; 0 for none
    bulk_tls: OnOff = OnOff.ON  # of data connections, if control connections use TLS
    relay_group: int = RELAY_GROUP  # hosts per relay of messages, on islands with at least as many hosts; 0 for none
    # Time without other sessions on its islands after which a session's launches are delegated to hosts; None: never.
    delegate_after_seconds: float | None = 1.0

    tenants: tuple[TenantSettings, ...] = ()  # not passed on command lines: see `cluster.tenant_settings`

    shapes: tuple[IslandShape, ...] = ()  # of islands from a cluster file; () for those of `islands`

    # For the engine ray: see `engines.ray.bundles`. Resources and labels are NAME=VALUE,NAME=VALUE, per host.
    ray_address: str = ""  # "" for that of RAY_ADDRESS, or of the node on which this runs
    ray_resources: str = ""
    ray_labels: str = ""
    ray_strategy: str = DEFAULT_RAY_STRATEGY

    # Suspended sessions and spilled arrays: see `migration`.
    suspend_directory: str = ""  # for sessions on disk; "" for a local directory of each host
    suspend_lower: SuspendLower = SuspendLower.OFF
    suspended_seconds: float = SUSPENDED_SECONDS  # for scripts with a session on disk to wait for the next cluster
    spill: int = 0  # bytes of memory per host for spilled arrays

    # For users' Python on the hosts: directories that all tenants' processes see, and whether they have a network.
    python_read: tuple[str, ...] = ()
    python_write: tuple[str, ...] = ()
    python_network: OnOff = OnOff.ON
    insecure_sandbox: bool = False  # start with several tenants even if nothing confines their Python

    @property
    def topology(self) -> Topology:
        """Return the islands that the cluster starts with. Raise SettingsError if they are invalid."""
        if self.shapes:
            return make_topology(self.shapes)
        try:
            shapes = Topology.parse(self.islands, self.platform, parse_mesh(self.mesh)).shapes
        except ValueError as error:
            raise SettingsError(str(error)) from None
        return make_topology(shapes)

    @property
    def start_seconds(self) -> float:
        """Return the time for an island to be up, for the first time or again."""
        return self.wait_seconds or (120.0 if self.engine == DEFAULT_ENGINE else HOSTS_SECONDS)

    @property
    def sequential(self) -> bool:
        return self.dispatch is Dispatch.SEQUENTIAL

    @classmethod
    def from_environment(cls) -> ClusterSettings:
        """Return the settings of the environment, with the variables of `VARIABLES`. Raise SettingsError."""
        said = {name: environment_variable(variable) for name, variable in VARIABLES.items()}
        sizes = {name: _bytes(VARIABLES[name], said[name]) for name in ("device_memory", "spill")}
        dispatch = _one_of(Dispatch, VARIABLES["dispatch"], said["dispatch"] or Dispatch.PARALLEL)
        times = ("lease_seconds", "wait_seconds", "grace_seconds", "suspended_seconds")
        seconds = {name: parse_seconds(said[name], VARIABLES[name]) for name in times}
        return cls(
            said["islands"] or DEFAULT_ISLANDS,
            said["platform"] or DEFAULT_PLATFORM,
            sizes["device_memory"],
            dispatch,
            said["policy"] or DEFAULT_POLICY,
            lease_seconds=seconds["lease_seconds"] or LEASE_SECONDS,
            wait_seconds=seconds["wait_seconds"],
            grace_seconds=seconds["grace_seconds"],
            mesh=said["mesh"],
            engine=said["engine"] or DEFAULT_ENGINE,
            bulk_tls=_one_of(OnOff, VARIABLES["bulk_tls"], said["bulk_tls"] or OnOff.ON),
            relay_group=_relay_group(said["relay_group"]),
            ray_address=said["ray_address"],
            ray_resources=said["ray_resources"],
            ray_labels=said["ray_labels"],
            ray_strategy=said["ray_strategy"] or DEFAULT_RAY_STRATEGY,
            suspend_directory=said["suspend_directory"],
            suspended_seconds=seconds["suspended_seconds"] or SUSPENDED_SECONDS,
            suspend_lower=_one_of(SuspendLower, VARIABLES["suspend_lower"], said["suspend_lower"] or SuspendLower.OFF),
            spill=sizes["spill"],
            python_read=_directories(VARIABLES["python_read"], said["python_read"]),
            python_write=_directories(VARIABLES["python_write"], said["python_write"]),
            python_network=_one_of(OnOff, VARIABLES["python_network"], said["python_network"] or OnOff.ON),
            insecure_sandbox=_flag(VARIABLES["insecure_sandbox"], said["insecure_sandbox"]),
        )


def _bytes(variable: str, text: str) -> int:
    try:
        return parse_bytes(text or "0")
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}") from None


def environment_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables from which `from_environment` reads these settings."""
    return {VARIABLES[name]: _text(value) for name, value in settings.items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return os.pathsep.join(value) if isinstance(value, tuple | list) else str(value)


def _flag(variable: str, text: str) -> bool:
    if text not in ("", "0", "1"):
        raise SettingsError(f"{variable} is {text!r}: expected 1 or 0")
    return text == "1"


def _directories(variable: str, text: str) -> tuple[str, ...]:
    return check_grants(variable, tuple(filter(None, text.split(os.pathsep))))


def check_grants(what: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the directories if they can be granted. Otherwise raise a SettingsError that names the setting `what`."""
    for each in paths:
        try:
            check_grant(each)
        except ValueError as error:
            raise SettingsError(f"{what}: {error}") from None
    return paths


def _relay_group(text: str) -> int:
    if not text:
        return RELAY_GROUP
    if not (text.isascii() and text.isdigit()) or int(text) == 1:
        raise SettingsError(f"{VARIABLES['relay_group']} is {text!r}: expected a number of hosts, or 0")
    return int(text)


Choice = TypeVar("Choice", bound=StrEnum)


def _one_of(choices: type[Choice], variable: str, text: str) -> Choice:
    try:
        return choices(text)
    except ValueError:
        raise SettingsError(f"{variable} is {text!r}: expected {' or '.join(choices)}") from None
