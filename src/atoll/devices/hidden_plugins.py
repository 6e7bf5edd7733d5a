"""Start JAX without a search for plug-ins.

`import jax` reads the metadata of each installed package to find the plug-ins of ROCm. The first use of a device reads
the entry points of each package to find all others. The CPU time grows with the number of packages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def hidden_plugins(platform: str) -> Iterator[None]:
    """Hide the installed packages within this block from JAX, which needs no plug-in if the platform is cpu.

    Other platforms find their plug-ins. The metadata of a package with a given name is never hidden. Other threads must
    not search for packages meanwhile.
    """
    if platform != "cpu":
        yield
        return
    import importlib.metadata as metadata  # takes long, and JAX imports it in any case

    search = metadata.distributions
    metadata.distributions = lambda **_: iter(())
    try:
        yield
    finally:
        metadata.distributions = search
