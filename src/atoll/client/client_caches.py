"""Caches whose contents are valid only while one client lives.

Devices, shardings and compiled programs keep their client alive. jaxlib also logs an error for a compiled program that
the script drops after its client has ended. So all caches of such objects are cleared with the client.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Cache(Protocol):
    """A cache that can be cleared."""

    def clear_cache(self) -> None: ...


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []


def clear_with_client(cache: Cache) -> None:
    """Clear the cache whenever a client starts or ends. Does not keep the cache alive."""
    _caches.add(cache)


def client_cache(limit: int) -> Callable[[_Function], _Function]:
    """Return a decorator that keeps `limit` results of a function, and drops them when a client starts or ends."""

    def decorate(function: _Function) -> _Function:
        cached = lru_cache(maxsize=limit)(function)
        _functions.append(cached.cache_clear)
        return cast(_Function, cached)

    return decorate


def clear_client_caches() -> None:
    """Clear all caches, because a client starts or ends."""
    for cache in list(_caches):
        cache.clear_cache()
    for clear in _functions:
        clear()


def abandon_client_caches() -> None:
    """Never clear the caches that exist, because they belong to the process from which this one was forked.

    Clearing them would use its sockets.
    """
    _caches.clear()
    _functions.clear()
