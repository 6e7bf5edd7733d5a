"""The environment variables that Atoll's processes read, except those of `cluster.settings`.

To add a variable, add it to one of the tables here. `python -m docs.settings_page` then writes the reference page.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from atoll.cluster.setting_forms import AMOUNT, TEXT, Form, Setting, Value, choice, count, seconds

_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_MIN_CERTIFICATE_SECONDS = 1.0
_MAX_CERTIFICATE_SECONDS = 10 * 365 * 86400.0


class CpuDevices(StrEnum):
    """The devices of the platform "cpu", if both the cluster and the script's process have some."""

    CLUSTER = "cluster"
    SCRIPT = "script"


class LogFormat(StrEnum):
    """The forms of the lines of Atoll's log."""

    TEXT = "text"
    JSON = "json"


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError("expected 1 or 0")
    return _FLAGS[text.lower()]


class Table:
    """Variables with a common purpose, in the order of their table in docs/reference/settings.md."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.settings: list[Setting[Any]] = []

    def add(self, variable: str, form: Form[Value], text: str, *, default: str = "", more: str = "") -> Setting[Value]:
        """Declare a variable. `text`, `default` and `more` are described at `Setting`."""
        setting = Setting(variable, form, text, default=default, more=more)
        self.settings.append(setting)
        return setting


SCRIPTS = Table("Scripts and commands")
PROCESSES = Table("Processes")
OTHERS = Table("Variables of other programs")
INTERNAL = Table("Variables that Atoll sets for its own processes")
TABLES = (SCRIPTS, PROCESSES, OTHERS, INTERNAL)

JAX_PLATFORMS = SCRIPTS.add(
    "JAX_PLATFORMS",
    TEXT,
    '`atoll` (or `atoll,cpu`, which means the same) runs a script on Atoll; `jax.local_devices(backend="cpu")` are its '
    "own CPU devices. Workers do not get this variable, nor any other `JAX_*`.",
)
CPU_DEVICES = SCRIPTS.add(
    "ATOLL_CPU_DEVICES",
    choice(CpuDevices),
    'The devices that `jax.devices("cpu")` returns if the cluster has CPU devices: those of the `cluster` or those of '
    "the `script`.",
    default="cluster",
    more="See [compatibility with libraries](guides/libraries.md).",
)
ADDRESS = SCRIPTS.add(
    "ATOLL_ADDRESS",
    TEXT,
    "Address of the cluster to use: unix:/path or HOST:PORT, or the name of your cluster on this machine, as of "
    "`atoll up --name`. If there are several addresses, separated by commas, they are tried in turn.",
    default="an embedded cluster",
)
JOIN = SCRIPTS.add(
    "ATOLL_JOIN",
    TEXT,
    "Join token of a cluster on TCP, or the file that contains it. It includes the address of the cluster.",
    default="none: your own cluster on this machine needs none",
)
TOKEN = SCRIPTS.add(
    "ATOLL_TOKEN",
    TEXT,
    "Token of a cluster. A cluster that is started with it serves only clients that send it. On TCP it is part of the "
    "clients' join token.",
    default="random on TCP, otherwise none",
)
SESSION_PLATFORM = SCRIPTS.add(
    "ATOLL_SESSION_PLATFORM",
    TEXT,
    "Platform whose devices a script sees, if the cluster has several platforms.",
    default="that of the first island",
)
RUN = SCRIPTS.add(
    "ATOLL_RUN",
    TEXT,
    "Name of the script's run. Only one session of a tenant has the name at a time: a new script waits for the earlier "
    "one to end.",
    default="none",
    more="See [detached runs](guides/detached-runs.md).",
)
DETACH = SCRIPTS.add(
    "ATOLL_DETACH",
    seconds(),
    "Time for which the submitted work of a named run continues after the end of its script.",
    default="0",
)
INSECURE = SCRIPTS.add(
    "ATOLL_INSECURE",
    Form(_flag, ""),
    "1 disables TLS on TCP, for clusters that are started and for clients that connect.",
    default="0",
)
HOST_TOKEN = SCRIPTS.add(
    "ATOLL_HOST_TOKEN",
    TEXT,
    "Token that `atoll host` sends to a cluster with ATOLL_INSECURE.",
    default="ATOLL_TOKEN",
)
CLUSTER_FILE = SCRIPTS.add(
    "ATOLL_CLUSTER",
    TEXT,
    "TOML file with islands, which may differ in hosts, devices, platform and topology, and with settings.",
    default="none",
    more="See [islands that differ](operate/clusters.md#islands-that-differ).",
)
TENANTS_FILE = SCRIPTS.add(
    "ATOLL_TENANTS",
    TEXT,
    "TOML file with the tenants that share the cluster: their tokens, shares, priorities, quotas and roles.",
    default="one tenant",
    more="See [tenants](operate/sharing.md#tenants).",
)

CACHE_DIRECTORY = PROCESSES.add(
    "ATOLL_CACHE_DIR",
    TEXT,
    "Directory for compiled programs, and for estimates of their durations; off stores none.",
    default="JAX's own cache directory if the script has set one, otherwise `~/.cache/atoll/programs`",
    more="See [usage records](design/scheduling.md#usage-records).",
)
CACHE_BYTES = PROCESSES.add(
    "ATOLL_CACHE_BYTES",
    AMOUNT,
    "Disk space for the compiled programs in ATOLL_CACHE_DIR. The least recently used ones are removed first.",
    default="16GiB",
)
TENANT_CACHE_BYTES = PROCESSES.add(
    "ATOLL_TENANT_CACHE_BYTES", AMOUNT, "Disk space for the compiled programs of one tenant.", default="4GiB"
)
KEY_FILE = PROCESSES.add(
    "ATOLL_KEY_FILE",
    TEXT,
    "File with the user's key, which authenticates compiled programs on disk and encrypts the journal: 32 bytes or "
    "more, not readable by other users. Hosts that share ATOLL_CACHE_DIR need the same key.",
    default="`key` in ATOLL_STATE_DIR, created if it is missing",
    more="See [compiled programs](design/compilation.md#entries-on-disk) and "
    "[the journal](design/journal.md#secrets-in-the-files).",
)
STATE_DIRECTORY = PROCESSES.add(
    "ATOLL_STATE_DIR",
    TEXT,
    "Directory for the usage and the logs of standing clusters, for sessions that are suspended to disk, and for the "
    "user's key; off stores no usage and no logs.",
    default="`$XDG_STATE_HOME/atoll`, otherwise `~/.local/state/atoll`",
)
CERTIFICATE_SECONDS = PROCESSES.add(
    "ATOLL_CERTIFICATE_SECONDS",
    seconds(_MIN_CERTIFICATE_SECONDS, _MAX_CERTIFICATE_SECONDS),
    "Seconds for which a cluster's certificates are valid; they are renewed earlier.",
    default="86400",
)
LEADER_LEASE = PROCESSES.add(
    "ATOLL_LEADER_LEASE",
    TEXT,
    "Lease that decides whether a controller or its standby serves the cluster, if `atoll up` has no --leader-lease: "
    "etcd://HOST:PORT/NAME, etcds://HOST:PORT/NAME or kubernetes://NAMESPACE/NAME.",
    default="none: the hosts decide",
    more="See [an external lease](operate/high-availability.md#an-external-lease).",
)
LEADER_LEASE_AUTHORITY = PROCESSES.add(
    "ATOLL_LEADER_LEASE_AUTHORITY",
    TEXT,
    "File with the certificate authority of a lease at etcds://, in PEM.",
    default="those of the system",
)
LEADER_LEASE_CERTIFICATE = PROCESSES.add(
    "ATOLL_LEADER_LEASE_CERTIFICATE",
    TEXT,
    "File with the client certificate for a lease at etcds://, in PEM.",
    default="none",
)
LEADER_LEASE_KEY = PROCESSES.add(
    "ATOLL_LEADER_LEASE_KEY",
    TEXT,
    "File with the key of ATOLL_LEADER_LEASE_CERTIFICATE, in PEM.",
    default="in the file of the certificate",
)
PYTHON_ENVIRONMENT = PROCESSES.add(
    "ATOLL_PYTHON_ENVIRONMENT",
    TEXT,
    "Names of environment variables, separated by commas, that Python of users on the hosts gets in addition to those "
    "of the allow-list; * for all but those of Atoll and JAX.",
    default="none; * on an embedded cluster",
    more="See [the allow-list](design/security.md#python-on-the-hosts).",
)
PYTHON_MEMORY = PROCESSES.add(
    "ATOLL_PYTHON_MEMORY",
    AMOUNT,
    "Memory that one Python process of a session may use on a host, such as 8GiB.",
    default="three quarters of the machine's",
)
PYTHON_SCRATCH = PROCESSES.add(
    "ATOLL_PYTHON_SCRATCH",
    AMOUNT,
    "Memory for the files that one Python process of a session writes to its TMPDIR and /dev/shm.",
    default="a quarter of the machine's",
)
COMPILER_SECONDS = PROCESSES.add(
    "ATOLL_COMPILER_SECONDS",
    seconds(),
    "Seconds of CPU time that one compilation of a tenant may use on a host.",
    default="1800",
    more="See [compiler processes](design/compilation.md#compiler-processes).",
)
COMPILER_MEMORY = PROCESSES.add(
    "ATOLL_COMPILER_MEMORY",
    AMOUNT,
    "Memory that one compiler process may use on a host of a cluster with tenants, such as 8GiB.",
    default="a quarter of the machine's",
)
NULL_MODEL = PROCESSES.add("ATOLL_NULL_MODEL", TEXT, "Model of null devices: tpu-v3 or instant.", default="tpu-v3")
LOG = PROCESSES.add(
    "ATOLL_LOG",
    TEXT,
    "Log level of Atoll's processes: debug, info, warning.",
    default="info for `atoll up` and `atoll host`, otherwise warning",
    more="See [logs](operate/watching.md#logs).",
)
LOG_FORMAT = PROCESSES.add(
    "ATOLL_LOG_FORMAT",
    choice(LogFormat),
    "Form of the lines of the log: `text`, or `json` for one object per line with time, level, process and message, "
    "and for events also event, session, tenant, island and actor.",
    default="text",
)
ISLAND = PROCESSES.add("ATOLL_ISLAND", count(), "Island that this machine's `atoll host` asks for.", default="any")
RANK = PROCESSES.add(
    "ATOLL_RANK",
    count(),
    "Rank that this machine's `atoll host` asks for: in its island, or without ATOLL_ISLAND among all hosts.",
    default="any",
)

AUTHORITY = INTERNAL.add(
    "ATOLL_AUTHORITY",
    TEXT,
    "Existing certificate authority with its key, in PEM, for the engine of `atoll up --authority FILE`. ATOLL_TOKEN "
    "and ATOLL_HOST_TOKEN are set with it.",
)
AUTHORITY_IS_KEPT = INTERNAL.add(
    "ATOLL_AUTHORITY_IS_KEPT", TEXT, "1 if the next cluster can use the engine's certificate authority."
)

XLA_FLAGS = OTHERS.add(
    "XLA_FLAGS",
    TEXT,
    "Flags of XLA for the workers. Atoll adds flags that disable XLA's time limits on collectives.",
    more="See [collectives that wait](design/failures.md#collectives-that-wait).",
)
GRPC_EXPERIMENTS = OTHERS.add(
    "GRPC_EXPERIMENTS",
    TEXT,
    "Experiments of gRPC in a script.",
    default="jaxlib's client does not use gRPC's event engine",
    more="See [the cost of a call](design/performance.md#what-was-done-about-it).",
)
NCCL_INTERFACE = OTHERS.add(
    "NCCL_SOCKET_IFNAME",
    TEXT,
    "Network interface of a GPU host for collectives.",
    default="the interface with the address at which the other hosts of the island reach the host",
)
PLUGINS = OTHERS.add(
    "PJRT_NAMES_AND_LIBRARY_PATHS", TEXT, "JAX's plug-ins. If it is set, any platform name is accepted."
)
CUDA_DEVICES = OTHERS.add("CUDA_VISIBLE_DEVICES", TEXT, "NVIDIA GPUs that the workers of a machine use.", default="all")
HIP_DEVICES = OTHERS.add("HIP_VISIBLE_DEVICES", TEXT, "AMD GPUs that the workers of a machine use.", default="all")
CACHE_HOME = OTHERS.add("XDG_CACHE_HOME", TEXT, "Base of the default of ATOLL_CACHE_DIR.", default="`~/.cache`")
STATE_HOME = OTHERS.add("XDG_STATE_HOME", TEXT, "Base of the default of ATOLL_STATE_DIR.", default="`~/.local/state`")
RUNTIME_DIRECTORY = OTHERS.add(
    "XDG_RUNTIME_DIR",
    TEXT,
    "Directory for sockets, and for the registry of this user's clusters.",
    default="the system's temporary directory",
)
PYTHON_PATH = OTHERS.add("PYTHONPATH", TEXT, "Modules for Python of users on the hosts.")
LIBRARY_PATH = OTHERS.add(
    "LD_LIBRARY_PATH", TEXT, "Libraries, which the sandbox of users' Python on the hosts may read."
)
LOG_LEVEL = OTHERS.add(
    "TF_CPP_MIN_LOG_LEVEL",
    TEXT,
    "The least severe messages that jaxlib logs: 0 for all, 1 for warnings, 2 for errors, 3 for fatal errors.",
    default="1",
)
NOTEBOOK = OTHERS.add("JPY_SESSION_NAME", TEXT, "The notebook of this kernel, which names its session.")
JOB_INDEX = OTHERS.add(
    "JOB_INDEX", count(), "Island of a host that Kubernetes started. The manifests of `atoll kubernetes` set it."
)
COMPLETION_INDEX = OTHERS.add("JOB_COMPLETION_INDEX", count(), "Rank in its island of a host that Kubernetes started.")
MPI_RANK = OTHERS.add("OMPI_COMM_WORLD_RANK", count(), "Rank among all hosts of a host that Open MPI started.")
PMIX_RANK = OTHERS.add("PMIX_RANK", count(), "Rank among all hosts of a host that a launcher with PMIx started.")
SLURM_RANK = OTHERS.add("SLURM_PROCID", count(), "Rank among all hosts of a host that Slurm started.")
