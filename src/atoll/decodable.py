"""Types that msgspec decodes, prepared so that several threads may be the first to use them."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar, overload

import msgspec

_T = TypeVar("_T")


class _Prepared:
    """The types whose description msgspec has built. One thread at a time builds descriptions."""

    def __init__(self) -> None:
        self._types: set[Any] = set()
        # Reentrant, because building one may collect garbage, which may decode.
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it

    def add(self, kind: Any) -> None:
        if kind in self._types:
            return
        with self._lock:
            msgspec.msgpack.Decoder(kind)
            self._types.add(kind)


_prepared = _Prepared()


@overload
def decodable(kind: type[_T]) -> type[_T]: ...
@overload
def decodable(kind: Any) -> Any: ...
def decodable(kind: Any) -> Any:
    """Return a type with which msgspec can decode on any thread. The first call for a type takes a while.

    msgspec describes a struct when a decoder first needs it, and keeps the description in the class before it is
    complete. A second thread that decodes the struct meanwhile ends the process with SIGSEGV. So each decoder, and each
    `decode` and `convert` with a type, gets the type from here; `tests/test_decodable.py` looks for others.
    """
    _prepared.add(kind)
    return kind
