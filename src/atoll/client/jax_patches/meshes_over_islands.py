"""Makes `jax.make_mesh` accept devices of several islands.

JAX refuses devices of several slices, since their order matters for the speed: few axes should have collectives between
slices, and they come first. The devices of a cluster are in the order of their islands, so the first axis of the mesh
is the one over islands.

The patch is installed in the first call of `make_mesh` if that is what creates the client. Therefore it changes what
`make_mesh` asks the devices for, not `make_mesh` itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll

ATTRIBUTE = "slice_index"
REFUSAL = "does not support multi-slice topologies"

# `make_mesh` itself, or in Python 3.11 the frame of its set comprehension, calls the new `__getattr__`.
_FRAMES = 2


def _in_one_slice(attribute: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    from jax._src import sharding_impls

    file = sharding_impls.__file__

    def __getattr__(self: Any, name: str) -> Any:
        if name == ATTRIBUTE and is_atoll(self.client) and _is_for_make_mesh(file):
            return 0
        return attribute(self, name)

    return __getattr__


def _is_for_make_mesh(file: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_filename != file:
            return False
        if frame.f_code.co_name == "make_mesh":
            return True
        frame = frame.f_back
    return False


PATCH = Patch(
    name="meshes over islands",
    enables="`jax.make_mesh` over devices of several islands",
    changes=(Replacement("jaxlib._jax:Device", "__getattr__", _in_one_slice, ()),),
    error=REFUSAL,
)
