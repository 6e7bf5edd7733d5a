"""Import JAX without what a process with CPU devices does not use.

- **Plug-ins.** `import jax` reads the metadata of each installed package to find the plug-ins of ROCm. The first use of
  a device reads the entry points of each package to find all others. The CPU time grows with the number of packages.
- **Operations.** `import jax` imports `jax.numpy`, `jax.lax` and others that trace functions, which take two fifths of
  its CPU time. A process that compiles and runs programs of others uses JAX's internal modules instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

# The names that a worker uses, with their modules. Any other name imports the rest of JAX.
_SOURCES = {
    "__version__": "jax.version:__version__",
    "config": "jax._src.config:config",
    "core": "jax.core",
    "device_put": "jax._src.api:device_put",
    "devices": "jax._src.xla_bridge:devices",
    "errors": "jax.errors",
    "lib": "jax.lib",
    "local_device_count": "jax._src.xla_bridge:local_device_count",
    "local_devices": "jax._src.xla_bridge:local_devices",
}


@contextlib.contextmanager
def partial_jax(platform: str) -> Iterator[None]:
    """If the platform is cpu, import JAX partially within this block, and hide the installed packages from it.

    After the block, the first use of a name that was not imported imports the rest of JAX. Other platforms import all
    of JAX, and find their plug-ins. The metadata of a package with a given name is never hidden. Other threads must not
    search for packages meanwhile.
    """
    if platform != "cpu":
        yield
        return
    defer_operations()
    import importlib.metadata as metadata  # takes long, and JAX imports it in any case

    search = metadata.distributions
    metadata.distributions = lambda **_: iter(())
    try:
        yield
    finally:
        metadata.distributions = search


def defer_operations() -> None:
    """Let `import jax` import nothing until one of its names is used, unless this process has imported it already."""
    if "jax" in sys.modules:
        return
    spec = importlib.util.find_spec("jax")
    if spec is not None:
        sys.modules["jax"] = _PartialPackage(spec)


class _PartialPackage(ModuleType):
    """JAX's package before its own code has run. Its submodules can be imported. Thread-safe."""

    _lock = threading.RLock()  # held by the thread that runs the code
    _is_running = False

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__package__ = spec.name
        self.__path__ = list(spec.submodule_search_locations or ())

    def __getattr__(self, name: str) -> Any:
        source = _SOURCES.get(name)
        if source is not None:
            return resolve_name(source)
        cls = _PartialPackage
        with cls._lock:
            # The code itself uses names before it defines them, and the import system looks for others.
            if cls._is_running or name.startswith("__"):
                return super().__getattribute__(name)  # raises AttributeError
            if type(self) is cls:
                cls._is_running = True
                try:
                    _run(self, self.__spec__)
                finally:
                    cls._is_running = False
        return getattr(self, name)


def _run(package: ModuleType, spec: ModuleSpec | None) -> None:
    """Run the code of the package, which imports the rest of JAX. After that, it is an ordinary module."""
    assert spec is not None
    assert spec.loader is not None
    before = dict(package.__dict__)
    try:
        spec.loader.exec_module(package)
    except BaseException:
        for name in package.__dict__.keys() - before.keys():
            delattr(package, name)
        raise
    package.__class__ = ModuleType
