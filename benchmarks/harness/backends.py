"""The compared backends, and the environments of their processes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.benchmark import Settings

# Directory of `benchmarks` and `examples`: the root of the repository.
ROOT = Path(__file__).resolve().parents[2]

DEVICES = 8

# Stock JAX on forced CPU devices hangs with some 34 computations in flight if its thread pool is small, and
# the pool's size also decides how a matrix product is cut. Every backend gets the same: two threads per device.
THREADS = str(2 * DEVICES)


@dataclass(frozen=True)
class Backend:
    """Name of a row of results, and the environment of its processes.

    Values may refer to a figure's point: {hosts}.
    """

    name: str
    environment: Mapping[str, str]


# Ray on loopback only (using its switch for macOS), with a token for each connection, and without usage reports.
RAY = {
    "JAX_PLATFORMS": "cpu",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("atoll", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": f"1x1x{DEVICES}"}),
        Backend(
            "stock",
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"},
        ),
        # The benchmark registers the platform: see `benchmarks.micro.floor`.
        Backend("jaxlib's client, instant proxy", {"JAX_PLATFORMS": "instant"}),
        Backend("atoll, 2 hosts", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "1x2x2"}),
        Backend("multi-controller JAX", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, 2 islands", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "2x1x1"}),
        Backend("atoll, 2 islands of 4 devices", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "2x1x4"}),
        Backend("atoll, 2 hosts of 4 devices", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "1x2x4"}),
        Backend("blocking socket", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, 2 machines", {"JAX_PLATFORMS": "atoll"}),
        Backend("blocking socket, 2 machines", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, parallel", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "16x1x1"}),
        Backend(
            "atoll, sequential",
            {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "16x1x1", "ATOLL_DISPATCH": "sequential"},
        ),
        Backend("atoll, 1 device", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "1x1x1"}),
        Backend("bare worker", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, rows", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "4x1x1"}),
        Backend("atoll, all-to-all", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "4x1x1"}),
        # These start their clusters themselves.
        Backend("atoll, rows, 2 machines", {"JAX_PLATFORMS": "atoll"}),
        Backend("atoll, all-to-all, 2 machines", {"JAX_PLATFORMS": "atoll"}),
        Backend("atoll, TLS", {"JAX_PLATFORMS": "atoll"}),
        Backend("atoll, plain TCP", {"JAX_PLATFORMS": "atoll"}),
        Backend("blocking TLS socket", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, journal", {"JAX_PLATFORMS": "atoll"}),
        Backend("atoll, no journal", {"JAX_PLATFORMS": "atoll"}),
        Backend("atoll, mpmd.jit", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "4x1x1"}),
        Backend("atoll, pipeline", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "4x1x1"}),
        *(
            Backend(
                f"atoll, {name} on null devices",
                {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"},
            )
            for name in ("mpmd.jit", "pipeline")
        ),
        Backend("atoll, 512 null islands", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, 512 null hosts", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, delegated runs", {"JAX_PLATFORMS": "cpu"}),
        Backend("atoll, node by node", {"JAX_PLATFORMS": "cpu"}),
        # For the paper's figures. "Atoll" and the ideal backends have null devices, and start them themselves.
        Backend("Atoll", {"JAX_PLATFORMS": "cpu"}),
        Backend("Atoll, sequential dispatch", {"JAX_PLATFORMS": "cpu"}),
        Backend("Atoll, one island", {"JAX_PLATFORMS": "cpu"}),
        Backend("Atoll, two islands", {"JAX_PLATFORMS": "cpu"}),
        Backend("ideal", {"JAX_PLATFORMS": "cpu"}),
        Backend("this machine", {"JAX_PLATFORMS": "cpu"}),
        Backend("Atoll, many clients", {"JAX_PLATFORMS": "cpu"}),
        Backend("fair", {"JAX_PLATFORMS": "cpu"}),
        Backend("first-come", {"JAX_PLATFORMS": "cpu"}),
        Backend("beside one at its quota", {"JAX_PLATFORMS": "cpu"}),
        Backend("alone", {"JAX_PLATFORMS": "cpu"}),
        Backend("watched", {"JAX_PLATFORMS": "cpu"}),
        Backend("not watched", {"JAX_PLATFORMS": "cpu"}),
        Backend(
            "JAX, one process",
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count={devices}"},
        ),
        *(
            Backend(f"Atoll, {way}", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "1x{hosts}x{devices}"})
            for way in ("op by op", "chained", "fused")
        ),
        *(
            Backend(f"Atoll, {name}", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "4x1x1"})
            for name in ("gpipe", "1f1b", "interleaved", "zb-h1")
        ),
        *(
            Backend(f"Atoll, {name}, 4 hosts", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "1x4x1"})
            for name in ("SPMD", "S=2, M=8", "S=4, M=16")
        ),
        Backend("Atoll, 2 islands of 2 devices", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "2x1x2"}),
        Backend("Atoll, 1 island of 2 hosts", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "1x2x2"}),
        Backend("Atoll, spmd", {"JAX_PLATFORMS": "atoll", "ATOLL_ISLANDS": "1x1x4"}),
        Backend("JAX, op by op", {"JAX_PLATFORMS": "cpu"}),
        Backend("JAX, fused", {"JAX_PLATFORMS": "cpu"}),
        Backend("Ray, op by op", RAY),
        Backend("Ray, chained", RAY),
        Backend("Ray, fused", RAY),
        Backend("TensorFlow, op by op", TENSORFLOW),
        Backend("TensorFlow, chained", TENSORFLOW),
    )
}


def environment_of(settings: Settings, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the whole environment of a backend's process, so that settings of the shell do not affect measurements.

    The process can import `benchmarks` and `examples` in any directory. It imports Atoll from `settings.source`, or
    from the same place as this process.
    """
    # Without files of bytecode, processes would compile Atoll's sources at each start.
    foreign = ("JAX_", "XLA_", "ATOLL_", "IFRT_", "TF_", "RAY_", "NPROC", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in inherited.items() if not name.startswith(foreign)}
    own = {name: value.format(**settings.point) for name, value in BACKENDS[settings.system].environment.items()}
    inherited_path = inherited.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys(filter(None, (settings.source, str(ROOT), *inherited_path))))
    return kept | {"NPROC": THREADS, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | own
