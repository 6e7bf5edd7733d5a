"""Copies NumPy arrays before `jnp.array` and `jnp.copy` pass them to a device.

These functions promise a copy, and run a computation whose argument is the array. jaxlib's client reads the memory of
an argument after the call has returned, so a script that overwrites the array meanwhile would get the new values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.client.jax_patches.patch import Patch, Replacement


def _copying(stage: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def impl(x: Any) -> Any:
        return stage(x.copy() if isinstance(x, np.ndarray) else x)

    return impl


PATCH = Patch(
    name="copies of arrays",
    enables="`jnp.array` and `jnp.copy` of NumPy arrays that the script then overwrites",
    changes=(Replacement("jax._src.core:stage_p", "impl", _copying, ("x",)),),
)
