"""Refuses programs that hold pointers of the client's process: XLA would follow them in this one, and end it.

JAX writes such pointers into custom calls that run the client's Python: callbacks while the program runs, and
`inspect_array_sharding` while it is partitioned. `custom_partitioning` is none of them: XLA looks its number up.
"""

from __future__ import annotations

from typing import Any

from jax._src.lib.mlir import ir

from atoll.errors import StatusError, unimplemented
from atoll.protocol.advice import CALLBACK_ADVICE, INSPECT_SHARDING_ADVICE

_ADVICE = {
    "InspectSharding": INSPECT_SHARDING_ADVICE,
    "xla_python_cpu_callback": CALLBACK_ADVICE,
    "xla_python_gpu_callback": CALLBACK_ADVICE,
    "xla_ffi_python_cpu_callback": CALLBACK_ADVICE,
    "xla_ffi_python_gpu_callback": CALLBACK_ADVICE,
    "xla_ffi_partitioned_python_cpu_callback": CALLBACK_ADVICE,
    "xla_ffi_partitioned_python_gpu_callback": CALLBACK_ADVICE,
    "xla_buffer_python_cpu_callback": CALLBACK_ADVICE,
    "xla_buffer_python_gpu_callback": CALLBACK_ADVICE,
}
_NAMES = tuple(target.encode() for target in _ADVICE)


def check(program: bytes, module: Any) -> None:
    """Raises UNIMPLEMENTED, with advice, where the module calls back into the client's process.

    `program` is the module's serialized form, in which all names stand as they are: most programs have none of these.
    """
    if not any(name in program for name in _NAMES):
        return
    found: list[StatusError] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            advice = _ADVICE.get(operation.attributes["call_target_name"].value)
            if advice is not None:
                found.append(unimplemented(advice))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if found:
        raise found[0]
