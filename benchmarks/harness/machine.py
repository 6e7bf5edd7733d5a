"""The machine and the software of a result, as they report themselves."""

import os
import platform
import time
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.harness.provenance import current_commit

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "ray", "tensorflow-cpu", "atoll")

_LOOK_SECONDS = 3.0


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cores: int  # that this process may use
    memory: int  # bytes
    kernel: str
    python: str
    packages: dict[str, str | None]  # name: version; None if not installed
    commit: str | None  # of the code; "+" if it differs from that: see `provenance`

    def __str__(self) -> str:
        """Return its CPUs and software, for the heading of a table."""
        return f"{self.cpu}, {self.cores} cores, Python {self.python}, jax {self.packages['jax']}"


def describe() -> Machine:
    return Machine(
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        commit=current_commit(),
    )


def load_average() -> float:
    """Processes that wanted to run, over the last minute."""
    return os.getloadavg()[0]


def until_quiet(bound: float, patience: float = 60.0) -> float:
    """How many CPUs others keep busy. Waits a while for it to be at most `bound`: a run before may be ending."""
    deadline = time.monotonic() + patience
    while (busy := _busy_cpus(_LOOK_SECONDS)) > bound and time.monotonic() < deadline:
        pass
    return busy


def _busy_cpus(seconds: float) -> float:
    """On average over the next so many seconds."""
    before, started = _busy_ticks(), time.monotonic()
    time.sleep(seconds)
    ticks = _busy_ticks() - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - started)


def _busy_ticks() -> int:
    user, nice, system, _, _, *rest = (int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return user + nice + system + sum(rest[:3])


def _field(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
