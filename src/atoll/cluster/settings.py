"""The settings of a cluster, which are chosen when it starts.

One record passes from the command or the client through the engine to the controller, and into its event log.

To add a setting, add a field with a `Setting` to `ClusterSettings`. The environment variable, the key of cluster files,
the option, its help text and docs/reference/settings.md follow from it; `python -m docs.settings_page` writes the page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, get_type_hints

import msgspec

from atoll.cluster.mesh import parse_mesh
from atoll.cluster.processes.leases import LEASE_SECONDS, MIN_LEASE_SECONDS
from atoll.cluster.sandbox.grants import check_grant
from atoll.cluster.setting_forms import AMOUNT, FLAG, TEXT, Form, Setting, checked, choice, count, listed, seconds
from atoll.cluster.tenant_settings import TenantSettings
from atoll.cluster.topology import IslandShape, Topology, make_topology
from atoll.errors import SettingsError

DEFAULT_ISLANDS = "1x1x8"
DEFAULT_PLATFORM = "cpu"
DEFAULT_ENGINE = "local"
DEFAULT_POLICY = "fair"
DEFAULT_RAY_STRATEGY = "STRICT_SPREAD"
GRACE_SECONDS = 60.0  # for peers to reconnect to the next controller, if a controller has a journal
SUSPENDED_SECONDS = 86400.0
LOCAL_SECONDS = 120.0  # for an island to be up, if the engine starts its hosts on this machine
HOSTS_SECONDS = 600.0  # for the hosts of an island to join, if the engine does not start them
# A gang on fewer islands is worth less than that each of them starts its part as early as possible.
JOINT_ISLANDS = 16
RELAY_GROUP = 16
# The decisions that a controller makes for its events. A journal is replayed with those of the version that wrote it,
# because hosts have received these: see "Change a stored struct" in CONTRIBUTING.md.
DECISIONS = 15
NULL_PLATFORM = "null"  # devices that take a given time and compute nothing: see `devices.null`


def check_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise SettingsError if `name` is not in `known`, such as a table of platforms, policies or engines."""
    if name not in known:
        raise SettingsError(f"there is no {what} {name!r}; the known ones are: {', '.join(known)}")


def read_topology(text: str) -> Topology:
    """Parse the topology of a cluster. Raise SettingsError for invalid text."""
    return ClusterSettings(text).topology


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


def _several_or_none(text: str, noun: str) -> int:
    """Return a number of hosts or islands, which may be 0 but not 1."""
    if not (text.isascii() and text.isdigit()) or int(text) == 1:
        raise ValueError(f"expected a number of {noun}, 2 or more, or 0")
    return int(text)


def _seconds_or_never(text: str) -> float | None:
    return None if text == "never" else seconds().parse(text)


_NEVER: Form[float | None] = Form(
    _seconds_or_never, "SECONDS|never", (int, float, str), lambda value: "never" if value is None else str(value)
)
_ON_OFF = choice(OnOff)
_RAY = "With `--engine ray`:"


class ClusterSettings(msgspec.Struct, frozen=True):
    """The settings of a cluster."""

    islands: Annotated[
        str,
        Setting(
            "ATOLL_ISLANDS",
            checked(Topology.parse, "SHAPE"),
            "ISLANDSxHOSTSxDEVICES: 2x1x4 has two islands of one host with four devices. JAX sees them as 2 slices "
            "(`slice_index`) of 4 devices. 1x2x4+1x1x8 has two islands of different shapes.",
            more="Only embedded clusters read the variable. `atoll up` takes its islands from `--islands` or a cluster "
            "file.",
        ),
    ] = DEFAULT_ISLANDS
    platform: Annotated[
        str,
        Setting(
            "ATOLL_PLATFORM",
            TEXT,
            "Platform of the workers: cpu, cuda, rocm or tpu, as JAX names it, or null for devices that compute "
            "nothing.",
            "platform",
            metavar="PLATFORM",
        ),
    ] = DEFAULT_PLATFORM
    device_memory: Annotated[
        int,
        Setting(
            "ATOLL_DEVICE_MEMORY",
            AMOUNT,
            "Memory of each device, such as 16GiB, if the platform does not report it (cpu) or reports too much. Work "
            "that does not fit waits, and work that can never fit fails.",
            "device-memory",
            default="what the platform reports; on CPUs, no limit",
        ),
    ] = 0
    dispatch: Annotated[
        Dispatch,
        Setting(
            "ATOLL_DISPATCH",
            choice(Dispatch),
            "Whether a launch is dispatched immediately (parallel), or after the previous one of its session is "
            "enqueued (sequential).",
            "dispatch",
        ),
    ] = Dispatch.PARALLEL
    policy: Annotated[
        str,
        Setting(
            "ATOLL_POLICY",
            TEXT,
            "Scheduling policy, which decides whose gang an island starts next: fair or first-come.",
            "policy",
            metavar="NAME",
        ),
    ] = DEFAULT_POLICY
    lease_seconds: Annotated[
        float,
        Setting(
            "ATOLL_LEASE",
            seconds(MIN_LEASE_SECONDS),
            "Seconds of silence after which a host or machine counts as lost; 3 or more, since peers send a heartbeat "
            "once per second.",
            "lease",
        ),
    ] = LEASE_SECONDS
    max_sessions: Annotated[
        int,
        Setting(
            "ATOLL_MAX_SESSIONS",
            count(1),
            "Number of sessions that the cluster accepts at a time.",
            "max-sessions",
            is_option=False,
        ),
    ] = 256
    abandoned_seconds: Annotated[
        float,
        Setting(
            "ATOLL_ABANDONED",
            seconds(),
            "Seconds for which computations of a session that has ended may still run, before their island restarts.",
            "abandoned",
            is_option=False,
        ),
    ] = 30.0
    mesh: Annotated[
        str,
        Setting(
            "ATOLL_TOPOLOGY",
            checked(parse_mesh, "MESH"),
            "Mesh of an island's devices, such as 4x4 or 2x2x2, if the platform does not report it (cpu). Slices with "
            "a shape are parts of it.",
            "topology",
            default="a line",
        ),
    ] = ""
    engine: Annotated[
        str,
        Setting(
            "ATOLL_ENGINE",
            TEXT,
            "Engine that starts the hosts: local (processes of this machine), hosts (machines that run `atoll host`) "
            "or ray (a Ray cluster).",
            "engine",
            metavar="ENGINE",
            more="See [clusters](operate/clusters.md).",
        ),
    ] = DEFAULT_ENGINE
    wait_seconds: Annotated[
        float,
        Setting(
            "ATOLL_WAIT",
            seconds(),
            "Seconds to wait for all hosts at the start, and for new hosts of a failed island.",
            "wait",
            default=f"{LOCAL_SECONDS:.0f}, and {HOSTS_SECONDS:.0f} with the engines hosts and ray",
        ),
    ] = 0.0
    grace_seconds: Annotated[
        float,
        Setting(
            "ATOLL_GRACE",
            seconds(),
            "Seconds for which a process that has lost its connection to the controller, or the controller itself, may "
            "be away before it counts as lost; 0 for none.",
            "grace",
            is_option=False,
            default=f"0, and {GRACE_SECONDS:.0f} with `atoll up --journal`",
            more="See [lost sockets](design/failures.md#lost-sockets).",
        ),
    ] = 0.0
    bulk_tls: Annotated[
        OnOff,
        Setting(
            "ATOLL_BULK_TLS",
            _ON_OFF,
            "Whether data connections of a cluster on TCP use TLS, as its control connections do. Use off only on a "
            "trusted network: arrays then travel unencrypted.",
            "bulk-tls",
        ),
    ] = OnOff.ON
    relay_group: Annotated[
        int,
        Setting(
            "ATOLL_RELAY_GROUP",
            Form(partial(_several_or_none, noun="hosts"), "NUMBER", (int,)),
            "Size of a relay group. On islands of at least this many hosts, one host of each group relays the "
            "controller's messages to the others; 0 disables relays.",
            "relay-group",
            is_option=False,
            more="See [relays](design/scheduling.md#relays).",
        ),
    ] = RELAY_GROUP
    joint_islands: Annotated[
        int,
        Setting(
            "ATOLL_JOINT_ISLANDS",
            Form(partial(_several_or_none, noun="islands"), "NUMBER", (int,)),
            "Number of islands from which a call of one function has a joint gang, which starts on all of its islands "
            "at once, even if these islands do not communicate; 0 disables joint gangs.",
            "joint-islands",
            is_option=False,
            more="See [computations over islands](design/computations-over-islands.md#joint-gangs).",
        ),
    ] = JOINT_ISLANDS
    delegate_after_seconds: Annotated[
        float | None,
        Setting(
            "ATOLL_DELEGATE_AFTER",
            _NEVER,
            "Seconds without other sessions on its islands after which a session's launches are delegated to the "
            "hosts, or never.",
            "delegate-after",
            is_option=False,
            more="See [delegated runs](design/scheduling.md#delegated-runs).",
        ),
    ] = 1.0

    decisions: int = DECISIONS

    tenants: tuple[TenantSettings, ...] = ()  # not passed on command lines: see `cluster.tenant_settings`

    shapes: tuple[IslandShape, ...] = ()  # of islands from a cluster file; () for those of `islands`

    # For the engine ray: see `engines.ray.bundles`.
    ray_address: Annotated[
        str,
        Setting(
            "ATOLL_RAY_ADDRESS",
            TEXT,
            f"{_RAY} address of the Ray cluster, HOST:PORT or ray://HOST:PORT.",
            "ray-address",
            default="RAY_ADDRESS, and without it the cluster of which this machine is a node",
            metavar="ADDRESS",
        ),
    ] = ""
    ray_resources: Annotated[
        str,
        Setting(
            "ATOLL_RAY_RESOURCES",
            TEXT,
            f"{_RAY} resources that a host requests of its node, such as CPU=8,GPU=4,rack=1.",
            "ray-resources",
            default="one CPU and the host's devices (GPU, TPU)",
            metavar="NAME=AMOUNT,...",
            more="See [Ray](operate/ray.md).",
        ),
    ] = ""
    ray_labels: Annotated[
        str,
        Setting(
            "ATOLL_RAY_LABELS",
            TEXT,
            f"{_RAY} labels that the nodes of hosts must have, such as ray.io/market-type=on-demand.",
            "ray-labels",
            metavar="NAME=VALUE,...",
        ),
    ] = ""
    ray_strategy: Annotated[
        str,
        Setting(
            "ATOLL_RAY_STRATEGY",
            TEXT,
            f"{_RAY} placement of an island's hosts: STRICT_SPREAD (each on a separate node), SPREAD, PACK or "
            "STRICT_PACK, as Ray names it.",
            "ray-strategy",
            metavar="STRATEGY",
        ),
    ] = DEFAULT_RAY_STRATEGY

    # Suspended sessions and spilled arrays: see `migration`.
    suspend_directory: Annotated[
        str,
        Setting(
            "ATOLL_SUSPEND_DIR",
            TEXT,
            "Directory on each host for sessions that are suspended to disk. A relative path begins at the default.",
            "suspend-directory",
            default="`suspended` in ATOLL_STATE_DIR",
            metavar="DIR",
            more="See [suspending](design/suspending.md).",
        ),
    ] = ""
    suspend_lower: Annotated[
        SuspendLower,
        Setting(
            "ATOLL_SUSPEND_LOWER",
            choice(SuspendLower),
            "Whether a session is suspended for one of a higher priority that lacks memory or exclusive devices, and "
            "where its arrays go.",
            "suspend-lower",
        ),
    ] = SuspendLower.OFF
    suspended_seconds: Annotated[
        float,
        Setting(
            "ATOLL_SUSPENDED",
            seconds(1.0),
            "Seconds after `atoll down` for which scripts of sessions that are suspended to disk wait for the next "
            "cluster with the same --journal.",
            "suspended",
            default=f"{SUSPENDED_SECONDS:.0f}, a day",
            more="See [between two clusters](design/suspending.md#between-two-clusters).",
        ),
    ] = SUSPENDED_SECONDS
    spill: Annotated[
        int,
        Setting(
            "ATOLL_SPILL",
            AMOUNT,
            "Memory of each host for spilled arrays, such as 8GiB: idle arrays, of lower priorities first, move there "
            "when other work lacks device memory.",
            "spill",
            default="none",
            more="See [memory pressure](design/suspending.md#memory-pressure).",
        ),
    ] = 0

    # For users' Python on the hosts.
    python_read: Annotated[
        tuple[str, ...],
        Setting(
            "ATOLL_PYTHON_READ",
            listed(check_grant, "DIR"),
            "Directory on the hosts that Python of all tenants may read, such as a data set. Only with --tenants.",
            "python-read",
            more="See [the sandbox](design/colocated-python.md#the-sandbox).",
        ),
    ] = ()
    python_write: Annotated[
        tuple[str, ...],
        Setting(
            "ATOLL_PYTHON_WRITE",
            listed(check_grant, "DIR"),
            "Directory on the hosts that Python of all tenants may read and write, such as one for checkpoints.",
            "python-write",
        ),
    ] = ()
    python_network: Annotated[
        OnOff,
        Setting(
            "ATOLL_PYTHON_NETWORK",
            _ON_OFF,
            "Whether Python of users on the hosts may use the network. Without it, an island of several hosts cannot "
            "run such Python.",
            "python-network",
        ),
    ] = OnOff.ON
    insecure_sandbox: Annotated[
        bool,
        Setting(
            "ATOLL_INSECURE_SANDBOX",
            FLAG,
            "Start a cluster with --tenants even if this system cannot protect the tenants' files from each other's "
            "Python.",
            "insecure-sandbox",
        ),
    ] = False

    @property
    def topology(self) -> Topology:
        """Return the islands that the cluster starts with. Raise SettingsError if they are invalid."""
        if self.shapes:
            return make_topology(self.shapes)
        try:
            mesh = parse_mesh(self.mesh)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        try:
            shapes = Topology.parse(self.islands, self.platform, mesh).shapes
        except ValueError as error:
            raise SettingsError(f"invalid islands {self.islands!r}: {error}") from None
        return make_topology(shapes)

    @property
    def start_seconds(self) -> float:
        """Return the time for an island to be up, for the first time or again."""
        return self.wait_seconds or (LOCAL_SECONDS if self.engine == DEFAULT_ENGINE else HOSTS_SECONDS)

    @property
    def sequential(self) -> bool:
        return self.dispatch is Dispatch.SEQUENTIAL

    @classmethod
    def from_environment(cls) -> ClusterSettings:
        """Return the settings of the environment. Raise a SettingsError that names the variable of an invalid one."""
        given: dict[str, Any] = {name: setting.get() for name, setting in SETTINGS.items() if setting.text()}
        return cls(**given)


def _settings() -> dict[str, Setting[Any]]:
    hints = get_type_hints(ClusterSettings, include_extras=True)
    found = {name: getattr(hints[name], "__metadata__", ()) for name in ClusterSettings.__struct_fields__}
    return {name: metadata[0] for name, metadata in found.items() if metadata}


# The settings by field of `ClusterSettings`.
SETTINGS = _settings()
_DEFAULTS = ClusterSettings()


def default_text(name: str) -> str:
    """Return what applies if the setting of this field is not set, for people; "" for nothing."""
    setting = SETTINGS[name]
    value = getattr(_DEFAULTS, name)
    if setting.default or setting.form.is_flag:
        return setting.default
    return f"{value:g}" if isinstance(value, float) else setting.form.text(value)


def environment_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables from which `from_environment` reads these settings."""
    return {SETTINGS[name].variable: SETTINGS[name].form.text(value) for name, value in settings.items()}


def settings_text(settings: ClusterSettings) -> str:
    """Return the settings that differ from their defaults, for the log: `islands=1x2x4, lease=10`."""
    given = [
        f"{setting.name or name}={setting.form.text(value)}"
        for name, setting in SETTINGS.items()
        if (value := getattr(settings, name)) != getattr(_DEFAULTS, name)
    ]
    return ", ".join(given) or "the default settings"
