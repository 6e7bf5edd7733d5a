"""The environment of a test file's run: stock JAX with forced host devices, or Atoll with islands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.cluster.environment_variables import TOKEN
from atoll.errors import ClusterError
from atoll.operate.cluster_queries import find, report_of

STOCK_DEVICES = 8

# One generated case instead of ten, and no slow tests: the same choice on both sides. Hash order is fixed
# because some parameterised names come out of sets.
COMMON = {"JAX_NUM_GENERATED_CASES": "1", "JAX_SKIP_SLOW_TESTS": "1", "PYTHONHASHSEED": "0"}

# The user's own settings of these families would make two runs different; Atoll's and gRPC's stay.
CLEARED = ("JAX_", "XLA_", "PYTEST_", "CONFORMANCE_")


# How many devices these files are to find, where that is not STOCK_DEVICES.
DEVICES_OF_FILES = {
    "flax/nnx/transforms_test": 4,  # it sets XLA_FLAGS when it is imported, before JAX makes its devices
    "pallas/gpu_pallas_interpret_race_detection_test": 1,  # on more, each test of these five is skipped
    "pallas/gpu_pallas_interpret_tcgen05_race_detection_test": 1,
    "pallas/gpu_pallas_interpret_test": 1,
    "pallas/tpu_pallas_interpret_test": 1,
    "pallas/tpu_pallas_interpret_thread_map_test": 1,
}


@dataclass(frozen=True)
class Environment:
    """A runtime to run tests on, and the environment variables that select it."""

    label: str
    settings: Mapping[str, str]

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
        return {**kept, **self.settings}


def forced(devices: int) -> str:
    return f"--xla_force_host_platform_device_count={devices}"


def stock() -> Environment:
    """Stock JAX on the CPU.

    NPROC sets the size of XLA's thread pool. With fewer threads than devices, tests with many collectives in flight
    sometimes deadlock, and would be missing from the baseline.
    """
    return Environment(
        "stock",
        {
            **COMMON,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": forced(STOCK_DEVICES),
            "NPROC": str(2 * STOCK_DEVICES),
        },
    )


def atoll(islands: str, platforms: str) -> Environment:
    """Atoll with the given islands, or "" on the cluster of ATOLL_JOIN or ATOLL_ADDRESS; `platforms` is JAX_PLATFORMS.

    The tests ask for `jax.devices("cpu")` and for `jax.local_devices(backend="cpu")` as a second backend: with
    `atoll,cpu`, Atoll is the default. (`atoll` also has the local CPU.) ATOLL_CPU_DEVICES lets both find the script's
    own devices.
    """
    embedded = {"ATOLL_ISLANDS": islands, "ATOLL_ADDRESS": "", "ATOLL_JOIN": ""} if islands else {}
    return Environment("atoll", {**COMMON, "JAX_PLATFORMS": platforms, "ATOLL_CPU_DEVICES": "script", **embedded})


def for_file(name: str, environment: Environment) -> Environment:
    """The same with as many devices as the file is to find. Not for a standing cluster, which has its own."""
    if (devices := DEVICES_OF_FILES.get(name)) is None:
        return environment
    own = {"XLA_FLAGS": forced(devices), "ATOLL_ISLANDS": f"1x1x{devices}"}
    changed = {variable: value for variable, value in own.items() if variable in environment.settings}
    return replace(environment, settings={**environment.settings, **changed})


def islands_of_cluster() -> str:
    """Return the islands of the cluster of ATOLL_JOIN or ATOLL_ADDRESS, such as 1x2x4.

    Raise ClusterError if neither names a cluster.
    """
    target = find()
    report = report_of(target, TOKEN.text())
    shapes = [[len(host["devices"]) for host in island["hosts"]] for island in report["islands"]]
    hosts, devices = len(shapes[0]), shapes[0][0]
    if any(shape != [devices] * hosts for shape in shapes):
        raise ClusterError(f"the islands of the cluster at {target.address} differ, and have devices {shapes}")
    return f"{len(shapes)}x{hosts}x{devices}"
