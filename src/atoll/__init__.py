"""Atoll: an open Pathways runtime for JAX. One controller, many accelerators, unmodified programs.

    JAX_PLATFORMS=atoll python train.py

runs any JAX script on an embedded cluster. `connect` does the same from Python; `program` makes a function over
several compiled functions into one launch; `make_virtual_device_set` asks the cluster for slices of its islands; the
command `atoll` starts clusters that stay.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll import errors as errors
    from atoll._version import __version__ as __version__
    from atoll.client.connect import connect as connect
    from atoll.client.program import program as program
    from atoll.client.slices import make_virtual_device_set as make_virtual_device_set
    from atoll.client.trace import trace as trace

__all__ = ["__version__", "connect", "errors", "make_virtual_device_set", "program", "trace"]

# Each is imported at its first use: JAX imports this package in every script, for the plug-in below it.
_PLACES = {
    "__version__": "atoll._version",
    "connect": "atoll.client.connect",
    "make_virtual_device_set": "atoll.client.slices",
    "program": "atoll.client.program",
    "trace": "atoll.client.trace",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("atoll.errors")
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
