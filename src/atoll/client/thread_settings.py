"""JAX's settings of one thread, such as `jax.default_matmul_precision` or `jax.set_mesh`, for use on another thread.

JAX keeps them per thread. They are a part of the key of its caches, so a function that is compiled with other settings
is compiled again when it is called.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax._src import config as _config
from jax._src import mesh as _mesh

_Config: Any = _config.State.__bases__[0]
_UNSET: Any = _config.config_ext.unset


@dataclass(frozen=True)
class ThreadSettings:
    """The settings that a thread has changed, each with its value, and its stack of meshes."""

    changed: tuple[tuple[Any, Any], ...]
    meshes: tuple[Any, ...]

    @classmethod
    def current(cls) -> ThreadSettings:
        """Return the settings of this thread."""
        values = [(each, each.get_local()) for each in _settings(len(_config.trace_context_names()))]
        return cls(
            tuple((each, value) for each, value in values if value is not _UNSET),
            tuple(_mesh.thread_resources.stack),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the settings on this thread. Also a decorator."""
        with contextlib.ExitStack() as stack:
            for setting, value in self.changed:
                stack.callback(_set, setting, setting.get_local())
                _set(setting, value)
            meshes = _mesh.thread_resources
            stack.callback(_set_meshes, tuple(meshes.stack))
            _set_meshes(self.meshes)
            yield


def _set(setting: Any, value: Any) -> None:
    setting.set_local(value)
    if isinstance(setting, _config.State) and setting._update_thread_local_hook:
        setting._update_thread_local_hook(None if value is _UNSET else value)


def _set_meshes(meshes: tuple[Any, ...]) -> None:
    """Set the meshes of the `with` statements around the present code."""
    _mesh.thread_resources.stack[:] = meshes
    _mesh.thread_resources.env = meshes[-1]


@functools.lru_cache(1)
def _settings(count: int) -> tuple[Any, ...]:
    """Return all settings of JAX. `count` is their number in the key of its caches, which grows with user contexts.

    JAX has a table of most of them, and the others in variables of its modules. User contexts can be anywhere.
    """
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("jax._src.")]
    others = [each for variables in modules for each in list(variables.values()) if isinstance(each, _Config)]
    users = [each._obj for each in gc.get_objects() if type(each) is _config.UserConfig]
    every = dict.fromkeys((*_config.config_states.values(), *others, *users))
    return tuple(each for each in every if each is not _config.thread_guard)  # it names the thread that sets it
