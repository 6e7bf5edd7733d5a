"""How much memory this machine has left for its processes."""

from __future__ import annotations

# Of all of it, that is to be left: below, the kernel may end any process.
_LEAST = 1 / 16


def has_memory_for(nbytes: int) -> bool:
    """Whether enough would be left where somebody took so much more. Page cache counts as left."""
    with open("/proc/meminfo") as lines:
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (found["MemAvailable"] << 10) - nbytes >= (found["MemTotal"] << 10) * _LEAST
