"""The function of JAX through which contents of this process become arrays, for patches that make some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atoll.client.jax_patches.patch import Replacement

# `(aval, sharding, shards, devices, committed)`; returns None if JAX itself has to make the array.
Make = Callable[[Any, Any, Sequence[Any], Sequence[Any], bool], Any]


def made_first_by(make: Make) -> Replacement:
    """Return the replacement that calls `make` for each array on devices, and JAX if that returns None."""

    def putting(send: Callable[..., Any]) -> Callable[..., Any]:
        def batched_device_put(
            aval: Any,
            sharding: Any,
            xs: Sequence[Any],
            devices: Sequence[Any],
            committed: bool = True,
            *others: Any,
            **options: Any,
        ) -> Any:
            array = make(aval, sharding, xs, devices, committed) if len(devices) else None
            return send(aval, sharding, xs, devices, committed, *others, **options) if array is None else array

        return batched_device_put

    return Replacement(
        "jax._src.interpreters.pxla",
        "batched_device_put",
        putting,
        ("aval", "sharding", "xs", "devices", "committed"),
    )
