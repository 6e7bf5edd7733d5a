"""What a module calls in its client's process.

The custom calls that run the client's Python while the program runs name a callable by its index; the worker gives XLA
a stub for each (`callback_stubs`). Those that are called while XLA compiles hold keys of the client's process, which
are replaced (`compile_calls`). All other ways of JAX hold pointers, which XLA would follow in this process, and end it:
those are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src.lib.mlir import ir

from atoll.devices.compilers.compiler_messages import Signature
from atoll.errors import StatusError, invalid, unimplemented
from atoll.host_services.calls.hlo_host_transfers import INFEED, NAMES, OUTFEED, RECEIVE, SEND, HostTransfers
from atoll.host_services.calls.python_custom_calls import BUFFER_CALLBACK, callback_index, result_types
from atoll.protocol.advice import CALLBACK_ADVICE, COMPILE_CALL_ADVICE
from atoll.protocol.compile_calls import CUSTOM_PARTITIONING, INSPECT_SHARDING
from atoll.protocol.messages import HostChannels
from atoll.protocol.questions import ADDRESS_CALL

_CALLBACKS = (
    "xla_ffi_python_cpu_callback",
    "xla_ffi_python_gpu_callback",
    "xla_ffi_partitioned_python_cpu_callback",
    "xla_ffi_partitioned_python_gpu_callback",
)
_WHILE_COMPILING = (INSPECT_SHARDING, CUSTOM_PARTITIONING)
# The target that stands for CUSTOM_PARTITIONING once its key is replaced. No client may write it.
PARTITIONING = "AtollCustomPartitioning"
_REFUSED = ("xla_python_cpu_callback", "xla_python_gpu_callback", PARTITIONING)
# What begins with this gets pointers: on CPUs, to memory of the process itself.
_POINTERS = "xla_buffer_python_"
# In MLIR's bytecode, names of operations stand as they are. What attributes hold may not.
_BYTECODE, _NAMES = b"ML\xefR", (b"custom_call", *NAMES)


# Replaces the key in an operation with such a target, or raises StatusError.
Replace = Callable[[Any, str], None]


def refused(operation: Any, target: str) -> None:
    """For a module whose client is not asked while it is compiled."""
    raise unimplemented(COMPILE_CALL_ADVICE)


def find(
    program: bytes,
    module: Any,
    count: int,
    replace: Replace = refused,
    channels: Sequence[HostChannels] = (),
    refuse_peers: bool = False,
) -> list[Signature]:
    """The signature of each of the client's `count` callables, by its index. Has `replace` change what calls the
    client while XLA compiles. With `channels`, each callable has its own, and no index.

    `program` is the module's serialized form: most programs have no custom calls. Raises UNIMPLEMENTED, with advice,
    where the module calls its client in another way, and INVALID_ARGUMENT where it calls what there is not. Raises
    UNIMPLEMENTED also for operations that wait for a host that sends nothing; see `HostTransfers`.
    """
    results = [Signature()] * (0 if channels else count)
    if not channels and program.startswith(_BYTECODE) and not any(name in program for name in _NAMES):
        return results
    transfers = HostTransfers(channels, refuse_peers)
    errors: list[StatusError] = []
    seen: set[int] = set()

    def visit(operation: Any) -> Any:
        try:
            if operation.name == "stablehlo.custom_call":
                _add(operation, results, seen, replace)
            elif operation.name in (SEND, RECEIVE, INFEED, OUTFEED):
                transfers.add(operation)
        except StatusError as error:
            errors.append(error)
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if errors:
        raise errors[0]
    return results or [
        Signature(transfers.types(each.receives), operands=transfers.types(each.sends), channels=each)
        for each in channels
    ]


def _add(operation: Any, results: list[Signature], seen: set[int], replace: Replace) -> None:
    target = operation.attributes["call_target_name"].value
    if target in _REFUSED or (target.startswith(_POINTERS) and target != BUFFER_CALLBACK):
        raise unimplemented(CALLBACK_ADVICE)
    if target in _WHILE_COMPILING:
        replace(operation, target)
        return
    if target == ADDRESS_CALL:
        _check_address_call(operation)
    if target not in _CALLBACKS and target != BUFFER_CALLBACK:
        return
    if not results:  # jaxlib's client refuses them unless the plug-in has taken the callables out
        raise unimplemented(CALLBACK_ADVICE)
    index = callback_index(operation)
    if not 0 <= index < len(results):
        raise invalid(f"the program calls callback {index} of {len(results)}")
    signature = Signature(result_types(operation), target == BUFFER_CALLBACK)
    if index in seen and results[index] != signature:
        raise invalid(f"the program calls callback {index} for results of different types")
    seen.add(index)
    results[index] = signature


def _check_address_call(operation: Any) -> None:
    """Raise INVALID_ARGUMENT unless the call has the one operand and the result that this host writes to memory."""
    results = [str(each.type) for each in operation.results]
    if len(operation.operands) != 1 or results != ["tensor<2xui32>"]:
        raise invalid(
            f"{ADDRESS_CALL} takes one array and returns tensor<2xui32>, not {', '.join(results) or 'nothing'}"
        )
