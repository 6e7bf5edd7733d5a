"""Lets an array say where it is: `unsafe_buffer_pointer()` is the address in the memory of its worker.

jaxlib's client gives pointers into its own process alone. Nobody in the script's process can read what is at a worker's
address; but equal addresses mean the same memory of a worker, as on stock JAX, and that is what they are compared for:
whether an array was copied, whether a donated one's memory was used again. On other devices than CPUs it is refused
as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from atoll.client.jax_patches.other_clients import client_of
from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll
from atoll.protocol.questions import ADDRESS_CALL


def _of_the_worker(pointer: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def unsafe_buffer_pointer(self: Any) -> int:
        client = client_of(self)
        if client is None or not is_atoll(client) or len(self.sharding.device_set) > 1 or client.platform != "cpu":
            return int(pointer(self))
        self._check_if_deleted()
        # Also while JAX traces; and this is no transfer of the user's.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return int(np.asarray(_asking()(self)).view(np.uint64)[0])

    return unsafe_buffer_pointer


@cache
def _asking() -> Any:
    import jax

    return jax.jit(jax.ffi.ffi_call(ADDRESS_CALL, jax.ShapeDtypeStruct((2,), np.uint32)))


PATCH = Patch(
    name="addresses",
    lifts="This operation is implemented for a PjRt-compatible backend only",
    replacements=(Replacement("jaxlib._jax:ArrayImpl", "unsafe_buffer_pointer", _of_the_worker, ("self",)),),
)
