"""Makes small arrays with one request, which jaxlib's client does not have to wait for.

jaxlib's client first sends the contents in a call of their own, and waits for its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.client.client_caches import client_cache
from atoll.client.jax_patches.host_callbacks import CLIENT_CHANNEL
from atoll.client.jax_patches.host_writes import made_first_by, whole_array
from atoll.client.jax_patches.patch import Patch
from atoll.client.plugin_programs import is_atoll
from atoll.transfers.shared_slots import SLOT_BYTES

_MAX_HANDLERS = 512


def made_of(aval: Any, sharding: Any, xs: Sequence[Any], devices: Sequence[Any], committed: bool) -> Any:
    """Return an array with a shard of `xs` on each device, or None if JAX itself has to make it."""
    from atoll.client.jax_internals import has_numpy_contents, host_to_device_guard

    x = xs[0]
    if not isinstance(x, np.ndarray | np.generic) or x.nbytes > SLOT_BYTES:
        return None
    if not is_atoll(devices[0].client) or host_to_device_guard() not in (None, "allow"):
        return None
    if sharding.memory_kind not in (None, devices[0].default_memory().kind):
        return None
    if not has_numpy_contents(aval.dtype) or not CLIENT_CHANNEL.has_slots(devices[0].client):
        return None
    whole = whole_array(aval, sharding, xs, devices, SLOT_BYTES)
    if whole is None:
        return None
    try:
        results = CLIENT_CHANNEL.small_writes.start(whole[0], devices, whole[1])
    except (RuntimeError, ValueError):  # JaxRuntimeError is a RuntimeError
        return None
    return None if results is None else results.consume_with_handlers([_handler(aval, sharding, committed)])[0]


@client_cache(_MAX_HANDLERS)
def _handler(aval: Any, sharding: Any, committed: bool) -> Any:
    from atoll.client import jax_internals as internals

    return internals.result_handler(aval, sharding, committed)


PATCH = Patch(
    name="small writes",
    enables="`jax.device_put` and `jnp.asarray` of small arrays without a round trip",
    changes=(made_first_by(made_of),),
)
