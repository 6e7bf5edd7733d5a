"""The settings of a cluster, which are chosen when it starts.

They travel as one record: from the command or the client through the engine to the controller, and into its event log.
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
GRACE_SECONDS = 60.0  # where a controller has a journal: for who knows it to come back to the next one
SUSPENDED_SECONDS = 86400.0
HOSTS_SECONDS = 600.0  # for hosts that others start to come
RELAY_GROUP = 16
NULL_PLATFORM = "null"  # devices that take a given time and compute nothing: `devices.null`

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
    """Raises SettingsError where `name` is none of the `known` ones: of platforms, policies or engines, say.

    Tables of kinds have "module:name" for each, which `pkgutil.resolve_name` imports where the kind is used.
    """
    if name not in known:
        raise SettingsError(f"there is no {what} {name!r}; the known ones are: {', '.join(known)}")


def read_topology(text: str, mesh: str = "") -> Topology:
    """The topology of a cluster. Raises SettingsError for what is none, or is not of islands with that mesh."""
    return ClusterSettings(text, mesh=mesh).topology


def parse_seconds(text: str, what: str) -> float:
    """Reads a time in seconds, 0 for "". Raises SettingsError, which names `what` it is for."""
    try:
        seconds = float(text or 0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingsError(f"{what} is {text!r}: expected a number of seconds")
    return seconds


class Dispatch(StrEnum):
    """Whether gangs are dispatched before those ahead of them are enqueued: see `launch.sequential`."""

    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"


class OnOff(StrEnum):
    ON = "on"
    OFF = "off"


class SuspendLower(StrEnum):
    """Whether a session is suspended for one of a higher priority that lacks memory or devices, and where it goes."""

    OFF = "off"
    MEMORY = "memory"
    DISK = "disk"


class ClusterSettings(msgspec.Struct, frozen=True):
    """A cluster, wherever it runs and listens."""

    islands: str = DEFAULT_ISLANDS  # ISLANDSxHOSTSxDEVICES, or several of these, joined by +
    platform: str = DEFAULT_PLATFORM  # of the workers, as JAX names it
    device_memory: int = 0  # bytes of each device; 0: what the platform says
    dispatch: Dispatch = Dispatch.PARALLEL
    policy: str = DEFAULT_POLICY  # for scheduling: one of `launch.policies`, which checks the name
    lease_seconds: float = LEASE_SECONDS  # how long a worker may be silent
    max_sessions: int = 256
    abandoned_seconds: float = 30.0  # for what a session left running on its devices to end; then its island restarts
    mesh: str = ""  # of an island's devices, such as 4x4, where the platform has none; "": a line
    engine: str = DEFAULT_ENGINE  # that starts the hosts: `engines.engine_interface`
    wait_seconds: float = 0.0  # for an island to be up, its hosts' coming included; 0: as long as the engine needs
    grace_seconds: float = 0.0  # for who has lost its connection to the controller, or it, to come back; 0: it is lost
    bulk_tls: OnOff = OnOff.ON  # of data connections, where control connections are with TLS
    relay_group: int = RELAY_GROUP  # hosts for which one of them relays messages, on islands of as many; 0: none does
    # A session's launches are delegated to hosts once no other session has used the islands for so long; None: never.
    delegate_after_seconds: float | None = 1.0

    # who shares it, of whom no command line says: see `cluster.tenant_settings`
    tenants: tuple[TenantSettings, ...] = ()

    # Of islands that differ in more than hosts and devices: see `cluster.cluster_file`. (): those of `islands`.
    shapes: tuple[IslandShape, ...] = ()

    # For the engine ray, see `engines.ray.bundles`: what each host is to have, as NAME=VALUE,NAME=VALUE.
    ray_address: str = ""  # "": that of RAY_ADDRESS, or of the node on which this runs
    ray_resources: str = ""
    ray_labels: str = ""
    ray_strategy: str = DEFAULT_RAY_STRATEGY

    # Suspended sessions and spilled arrays: see `migration`.
    suspend_directory: str = ""  # for sessions on disk; "": one of each host's own
    suspend_lower: SuspendLower = SuspendLower.OFF
    suspended_seconds: float = SUSPENDED_SECONDS  # between two clusters, for scripts whose session is on disk to wait
    spill: int = 0  # bytes of each host's memory for arrays that others need the memory of; 0: none

    # For Python of users on the hosts: directories that all tenants' processes see, and whether they have a network.
    python_read: tuple[str, ...] = ()
    python_write: tuple[str, ...] = ()
    python_network: OnOff = OnOff.ON
    insecure_sandbox: bool = False  # start with several tenants even if nothing confines their Python

    @property
    def topology(self) -> Topology:
        """The islands that the cluster starts with. Raises SettingsError for what is none."""
        if self.shapes:
            return make_topology(self.shapes)
        try:
            shapes = Topology.parse(self.islands, self.platform, parse_mesh(self.mesh)).shapes
        except ValueError as error:
            raise SettingsError(str(error)) from None
        return make_topology(shapes)

    @property
    def start_seconds(self) -> float:
        """How long an island may take to be up, for the first time or again."""
        return self.wait_seconds or (120.0 if self.engine == DEFAULT_ENGINE else HOSTS_SECONDS)

    @property
    def sequential(self) -> bool:
        return self.dispatch is Dispatch.SEQUENTIAL

    @classmethod
    def from_environment(cls) -> ClusterSettings:
        """What `VARIABLES` say, and the defaults.

        Raises SettingsError where one that is a number, or one of several words, cannot be read.
        """
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
    """Return the variables that say these settings, by their names, as `from_environment` reads them."""
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
    """Return these directories if they can be granted. Raises SettingsError, which names `what` they were given by."""
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
