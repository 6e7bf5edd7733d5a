"""What a run of a test file stands on: stock JAX with forced host devices, or Atoll with islands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.errors import ClusterError
from atoll.operate.clusters import find, report_of
from atoll.protocol.messages import DEFAULT_TOKEN_VARIABLE

STOCK_DEVICES = 8

# One generated case instead of ten, and no slow tests: the same choice on both sides. Hash order is fixed
# because some parameterised names come out of sets.
COMMON = {"JAX_NUM_GENERATED_CASES": "1", "JAX_SKIP_SLOW_TESTS": "1", "PYTHONHASHSEED": "0"}

# The user's own settings of these families would make two runs different; Atoll's and gRPC's stay.
CLEARED = ("JAX_", "XLA_", "PYTEST_", "CONFORMANCE_")


# These files set XLA_FLAGS when they are imported, before JAX makes its devices: stock has as many as they say. An
# embedded cluster has as many, too; a standing one has what it has.
ISLANDS_OF_FILES = {"flax/nnx/transforms_test": "1x1x4"}


@dataclass(frozen=True)
class Environment:
    """A runtime to run tests on, and the environment variables that select it."""

    label: str
    settings: Mapping[str, str]

    def variables(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
        return {**kept, **self.settings}


def stock() -> Environment:
    """Stock JAX on the CPU.

    NPROC makes room for all devices in XLA's thread pool: with fewer threads than devices, tests that keep
    many collectives in flight deadlock now and then and would be missing from the baseline.
    """
    return Environment(
        "stock",
        {
            **COMMON,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={STOCK_DEVICES}",
            "NPROC": str(2 * STOCK_DEVICES),
        },
    )


def atoll(islands: str, platforms: str) -> Environment:
    """Atoll with the given islands, or "" on the cluster of ATOLL_JOIN or ATOLL_ADDRESS; `platforms` is JAX_PLATFORMS.

    The tests ask for `jax.devices("cpu")` and for `jax.local_devices(backend="cpu")` as a second backend: with
    `atoll,cpu`, Atoll is the default. (`atoll` alone has the local CPU, too.)
    """
    embedded = {"ATOLL_ISLANDS": islands, "ATOLL_ADDRESS": "", "ATOLL_JOIN": ""} if islands else {}
    return Environment("atoll", {**COMMON, "JAX_PLATFORMS": platforms, **embedded})


def for_file(name: str, atoll: Environment) -> Environment:
    """What a file of that name runs on: `atoll`, unless the file makes its own devices on stock."""
    if name not in ISLANDS_OF_FILES or "ATOLL_ISLANDS" not in atoll.settings:
        return atoll
    return replace(atoll, settings={**atoll.settings, "ATOLL_ISLANDS": ISLANDS_OF_FILES[name]})


def islands_of_cluster() -> str:
    """What the cluster of ATOLL_JOIN or ATOLL_ADDRESS has, such as 1x2x4. Raises ClusterError where there is none."""
    target = find()
    report = report_of(target, os.environ.get(DEFAULT_TOKEN_VARIABLE, ""))
    shapes = [[len(host["devices"]) for host in island["hosts"]] for island in report["islands"]]
    hosts, devices = len(shapes[0]), shapes[0][0]
    if any(shape != [devices] * hosts for shape in shapes):
        raise ClusterError(f"the islands of the cluster at {target.address} differ, and have devices {shapes}")
    return f"{len(shapes)}x{hosts}x{devices}"
