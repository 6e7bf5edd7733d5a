"""Modules that jaxlib's MPMD extension and Shardy's Python import under names that the wheels do not have.

`jaxlib._sdy_mpmd` imports `jax.jaxlib._jax`, and Shardy's Python (openxla/shardy) imports `mlir`. The wheels have the
same modules as `jaxlib._jax` and `jaxlib.mlir`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_MLIR = "jaxlib.mlir"


def add_missing_modules() -> None:
    """Make the modules importable under the missing names. A package `mlir` that is installed is not replaced."""
    for name in ("jaxlib", "jaxlib._jax"):
        sys.modules.setdefault(f"jax.{name}", importlib.import_module(name))
    if "mlir" not in sys.modules and importlib.util.find_spec("mlir") is None:
        importlib.import_module(f"{_MLIR}.ir")
        for name in [each for each in sys.modules if each == _MLIR or each.startswith(f"{_MLIR}.")]:
            sys.modules.setdefault(name.removeprefix("jaxlib."), sys.modules[name])


def import_mpmd() -> Any:
    """Return jaxlib's MPMD extension."""
    add_missing_modules()
    return importlib.import_module("jaxlib._sdy_mpmd")
