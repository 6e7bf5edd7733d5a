"""What XLA calls in the place of a client's callables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src.lib import xla_client as xc

from atoll.devices.compilers.compiler_messages import Signature
from atoll.errors import StatusError, unimplemented
from atoll.host_services.calls.client_calls import ClientError
from atoll.host_services.calls.client_errors import kept, wrapped
from atoll.host_services.calls.function_callbacks import Callbacks
from atoll.ir.types import ShardType
from atoll.transfers.dtypes import numpy_dtype


class Held:
    """Lives as long as XLA can still call the client's Python: in a run, too, whose executable was dropped."""

    def __init__(self, callbacks: Callbacks) -> None:
        callbacks.retain()
        weakref.finalize(self, callbacks.release).atexit = False


def stubs(held: Held, callbacks: Callbacks, signatures: Sequence[Signature], client: Any) -> list[Any]:
    """What XLA's `client` takes for each of the function's callbacks, in their order."""
    return [
        _for_xla(_stub(held, callbacks, position, each.results), each, client)
        for position, each in enumerate(signatures)
    ]


def _stub(held: Held, callbacks: Callbacks, position: int, types: tuple[ShardType, ...]) -> Callable[..., Any]:
    def stub(*arguments: np.ndarray[Any, Any] | None) -> tuple[Any, ...]:
        _ = held
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
    """The serializer, which jaxlib asks for and a local client has no use for."""
    raise unimplemented("a callback's stub is its process's own")


def _shapes(types: Sequence[ShardType]) -> list[Any]:
    return [xc.Shape.array_shape(numpy_dtype(dtype), shape) for dtype, shape in types]


def _on_buffers(stub: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Takes XLA's buffers, the results' after the arguments', and writes what the stub returns into the results'."""

    def on_buffers(context: Any, *buffers: Any) -> None:
        count = len(buffers) - len(signature.results)
        results = stub(*[np.asarray(each) for each in buffers[:count]])
        for buffer, result in zip(buffers[count:], results, strict=True):
            np.asarray(buffer)[...] = result

    return on_buffers
