"""Calls from a program to Python in its client's process: how a module's custom calls are found, and run.

Custom calls that run while the program runs contain the index of a callable; the worker gives XLA a stub for each.
Custom calls that run while XLA compiles contain keys, which `xla_compile_calls` replaces. JAX's other custom calls
contain pointers of the client's process, which would crash this process, so modules with them are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir

from atoll.devices.compilers.compiler_messages import RenamedTarget, Signature
from atoll.errors import StatusError, invalid, unimplemented
from atoll.host_services.calls.callback_operations import (
    BUFFER_CALLBACK,
    INFEED,
    NAMES,
    OUTFEED,
    RECEIVE,
    SEND,
    HostTransfers,
    callback_index,
    result_types,
)
from atoll.host_services.calls.client_calls import ClientError, kept, wrapped
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.ir.types import ShardType
from atoll.protocol.callbacks import CALLBACK_ADVICE, COMPILE_CALL_ADVICE, CUSTOM_PARTITIONING, INSPECT_SHARDING
from atoll.protocol.ffi_libraries import PRIVATE_PREFIX
from atoll.protocol.messages import HostChannels
from atoll.protocol.questions import ADDRESS_CALL
from atoll.transfers.dtypes import numpy_dtype

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
# Custom calls whose names have this prefix get pointers to buffers.
_POINTERS = "xla_buffer_python_"
# MLIR's bytecode contains the names of operations as plain text. That is not certain for contents of attributes.
_BYTECODE, _NAMES = b"ML\xefR", (b"custom_call", *NAMES)


# Replaces the key in an operation with the given target, or raises StatusError.
Replace = Callable[[Any, str], None]


def refused(operation: Any, target: str) -> None:
    """Refuse the operation: a `Replace` for modules whose compilation cannot call the client."""
    raise unimplemented(COMPILE_CALL_ADVICE)


def find(
    program: bytes,
    module: Any,
    count: int,
    replace: Replace = refused,
    channels: Sequence[HostChannels] = (),
    refuse_peers: bool = False,
    targets: Sequence[RenamedTarget] = (),
) -> list[Signature]:
    """Return the signatures of the client's `count` callables, by index. Rename the custom calls of `targets`.

    `replace` is called for each custom call that runs while XLA compiles. With `channels`, callables have channels
    instead of indices. `program` is the module's serialized form, which shows quickly that most modules have no custom
    calls.

    Raises UNIMPLEMENTED, with advice, if the module calls its client in another way, or waits for data that no host
    sends (see `HostTransfers`). Raises INVALID_ARGUMENT if it calls an unknown callable.
    """
    results = [Signature()] * (0 if channels else count)
    if not channels and program.startswith(_BYTECODE) and not any(name in program for name in _NAMES):
        return results
    transfers = HostTransfers(channels, refuse_peers)
    errors: list[StatusError] = []
    seen: set[int] = set()
    renamed = {each.name: each.private_name for each in targets}

    def visit(operation: Any) -> Any:
        try:
            if operation.name == "stablehlo.custom_call":
                _add(operation, results, seen, replace, renamed)
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


def _add(
    operation: Any, results: list[Signature], seen: set[int], replace: Replace, renamed: Mapping[str, str]
) -> None:
    target = operation.attributes["call_target_name"].value
    if target in renamed:
        operation.attributes["call_target_name"] = ir.StringAttr.get(renamed[target])
        return
    if target.startswith(PRIVATE_PREFIX):
        raise invalid(f"the program calls {target[:100]!r}, and only this host may use names that begin so")
    if target in _REFUSED or (target.startswith(_POINTERS) and target != BUFFER_CALLBACK):
        raise unimplemented(CALLBACK_ADVICE)
    if target in _WHILE_COMPILING:
        replace(operation, target)
        return
    if target == ADDRESS_CALL:
        _check_address_call(operation)
    if target not in _CALLBACKS and target != BUFFER_CALLBACK:
        return
    if not results:  # the client has sent no callables, so the call contains a pointer
        raise unimplemented(CALLBACK_ADVICE)
    index = callback_index(operation)
    if not 0 <= index < len(results):
        raise invalid(f"the program calls callback {index} of {len(results)}")
    signature = Signature(result_types(operation), target == BUFFER_CALLBACK)
    if index in seen and results[index] != signature:
        raise invalid(f"the program calls callback {index} with different result types")
    seen.add(index)
    results[index] = signature


def _check_address_call(operation: Any) -> None:
    """Raise INVALID_ARGUMENT unless the call has one operand, and the result type that the host writes."""
    results = [str(each.type) for each in operation.results]
    if len(operation.operands) != 1 or results != ["tensor<2xui32>"]:
        raise invalid(
            f"{ADDRESS_CALL} takes one array and returns tensor<2xui32>, not {', '.join(results) or 'nothing'}"
        )


def stubs(callbacks: Callbacks, signatures: Sequence[Signature], client: Any) -> list[Any]:
    """Return the callables that XLA calls for each of the function's callbacks, in their order.

    They retain the callbacks for as long as XLA can call them, which includes runs of an executable that was dropped.
    """
    return [
        _for_xla(_stub(callbacks, position, each.results), each, client) for position, each in enumerate(signatures)
    ]


def _stub(callbacks: Callbacks, position: int, types: tuple[ShardType, ...]) -> Callable[..., Any]:
    def stub(*arguments: np.ndarray[Any, Any] | None) -> tuple[Any, ...]:
        try:
            return callbacks.call(position, types, arguments)
        except (ClientError, StatusError) as error:
            if not callbacks.spans_devices:
                raise wrapped(error) from None
            callbacks.keep_failure(kept(error))
            return tuple(None if dtype == "token" else np.zeros(shape, numpy_dtype(dtype)) for dtype, shape in types)

    return stub


def _for_xla(stub: Callable[..., Any], signature: Signature, client: Any) -> Any:
    if signature.channels is not None:
        operands, results = map(_shapes, (signature.operands, signature.results))
        sends, receives = map(list, (signature.channels.sends, signature.channels.receives))
        return client.make_python_callback_from_host_send_and_recv(
            stub, operands, results, sends, receives, _stays_here
        )
    return _on_buffers(stub, signature) if signature.takes_buffers else stub


def _stays_here(stub: Any) -> bytes:
    """Refuse to serialize a stub. jaxlib requires a serializer, which a local client never calls."""
    raise unimplemented("a callback's stub cannot be serialized")


def _shapes(types: Sequence[ShardType]) -> list[Any]:
    return [xc.Shape.array_shape(numpy_dtype(dtype), shape) for dtype, shape in types]


def _on_buffers(stub: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Return a callable for XLA's buffers: those of the arguments, then those of the results, which it writes."""

    def on_buffers(context: Any, *buffers: Any) -> None:
        count = len(buffers) - len(signature.results)
        results = stub(*[np.asarray(each) for each in buffers[:count]])
        for buffer, result in zip(buffers[count:], results, strict=True):
            np.asarray(buffer)[...] = result

    return on_buffers
