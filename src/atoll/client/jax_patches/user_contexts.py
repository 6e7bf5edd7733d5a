"""Callbacks in the contexts of the thread that called.

On one CPU device stock JAX runs a program's callbacks inside of the call, on the user's thread: they see the meshes,
the default device and whatever else it has set by `with`. Here they run on other threads while that one waits, and get
its settings. Of two threads inside of calls of one executable, the callbacks of both have the later one's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

# What of JAX's configuration a thread has set for itself: (setting, value).
Settings = tuple[tuple[Any, Any], ...]


@cache
def _all_settings() -> tuple[Any, ...]:
    from jax._src import config

    return tuple(each for each in vars(config).values() if isinstance(each, config.config_ext.Config))


def settings() -> Settings:
    """This thread's."""
    from jax._src import config

    unset = config.config_ext.unset
    own = ((each, each.get_local()) for each in _all_settings())
    return tuple((each, value) for each, value in own if value is not unset)


@contextlib.contextmanager
def within(chosen: Settings) -> Iterator[None]:
    """This thread has these settings meanwhile."""
    before = [(each, _set(each, value)) for each, value in chosen]
    try:
        yield
    finally:
        for each, value in reversed(before):
            _set(each, value)


def _set(setting: Any, value: Any) -> Any:
    """Returns what it was."""
    from jax._src import config

    before = setting.swap_local(value)
    if (hook := getattr(setting, "_update_thread_local_hook", None)) is not None:
        hook(None if value is config.config_ext.unset else value)
    return before


class Caller:
    """The settings of the thread that has called an executable last."""

    def __init__(self) -> None:
        self.settings: Settings = ()

    def bind(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(callback)
        def call(*arguments: Any) -> Any:
            chosen = self.settings
            if not chosen:
                return callback(*arguments)
            with within(chosen):
                return callback(*arguments)

        return call
