"""Operations of a program that call the client's Python: custom calls, and sends to and receives from the host.

On TPUs, JAX lowers a callback to one send per argument and one receive per result, each on a separate channel
(`_emit_tpu_python_callback` in jax/_src/callback.py). The module does not say which channels belong to one callback.
This is based on JAX's sources and is not tested on a TPU. The functions import JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from atoll.errors import invalid, unimplemented
from atoll.ir.types import DTYPE_BITS, ShardType
from atoll.protocol.callbacks import CALLBACK_ADVICE
from atoll.protocol.messages import HostChannels
from atoll.transfers.dtypes import numpy_dtype

SEND, RECEIVE = "stablehlo.send", "stablehlo.recv"
INFEED, OUTFEED = "stablehlo.infeed", "stablehlo.outfeed"
# Names of these operations in the portable form of a module; a version number follows each name.
NAMES = (b"send_v", b"recv_v", b"infeed_v", b"outfeed_v")

# The custom call whose callable reads and writes XLA's buffers, instead of taking and returning arrays.
BUFFER_CALLBACK = "xla_buffer_python_cpu_callback"

_NO_HOST = (
    "programs on a cluster cannot use infeed or outfeed: they would occupy their devices forever. Pass arrays as "
    "arguments and results, or use jax.pure_callback or jax.experimental.io_callback"
)
_NO_PEERS = (
    "programs on a cluster with tenants cannot send between devices: a send without a matching receive would occupy "
    "its device. Use a collective such as jax.lax.ppermute"
)


def callback_index(operation: Any) -> int:
    """Return the index of the program's callable that a custom call calls. Raise INVALID_ARGUMENT if it has none."""
    from jax._src.lib.mlir import ir

    attributes = operation.attributes
    given = [attributes[name] for name in ("mhlo.backend_config", "backend_config") if name in attributes]
    given = [each for each in given if not (isinstance(each, ir.StringAttr) and not each.value)]
    if len(given) != 1 or not isinstance(given[0], ir.DictAttr) or "index" not in given[0]:
        raise invalid("the program has a callback without a unique index")
    return int(ir.IntegerAttr(given[0]["index"]).value)


def result_types(operation: Any) -> tuple[ShardType, ...]:
    """Return the types of a custom call's results. Raise INVALID_ARGUMENT if a callable cannot return one."""
    return tuple(shard_type(result.type) for result in operation.results)


def aliases(operation: Any) -> dict[int, int]:
    """Return the arguments whose memory the results of a custom call share, by the positions of the results."""
    from jax._src.lib.mlir.dialects import hlo

    attributes = operation.attributes
    listed = attributes["output_operand_aliases"] if "output_operand_aliases" in attributes else ()  # noqa: SIM401
    found = [hlo.OutputOperandAlias(each) for each in listed]
    return {(*each.output_tuple_indices, 0)[0]: each.operand_index for each in found}


def shard_type(kind: Any) -> ShardType:
    """Convert an MLIR type. Raise INVALID_ARGUMENT if a callable cannot take or return it."""
    from jax._src.lib.mlir import ir

    if str(kind) == "!stablehlo.token":
        return "token", ()
    if isinstance(kind, ir.RankedTensorType) and kind.has_static_shape and str(kind.element_type) in _dtypes():
        return _dtypes()[str(kind.element_type)], tuple(kind.shape)
    raise invalid(f"a callback cannot take or return {str(kind)[:100]}")


class HostTransfers:
    """The types of the arrays that a module sends and receives on its callables' channels.

    With `refuse_peers`, a module cannot send from one device to another: a send without a matching receive would occupy
    its device until the session ends.
    """

    def __init__(self, channels: Sequence[HostChannels], refuse_peers: bool = False) -> None:
        self._refuses_peers = refuse_peers
        self._sends = {channel for each in channels for channel in each.sends}
        self._receives = {channel for each in channels for channel in each.receives}
        self._types: dict[int, ShardType] = {}

    def add(self, operation: Any) -> None:
        """Add an infeed, outfeed, send or receive.

        Raises UNIMPLEMENTED for an infeed or outfeed, and for a transfer with the host on a channel without a callable,
        because the device would wait forever. Transfers between devices are left to XLA unless they are refused.
        """
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import hlo

        if operation.name in (INFEED, OUTFEED):
            raise unimplemented(f"{operation.name}: {_NO_HOST}")
        attributes = operation.attributes
        if "is_host_transfer" not in attributes or not ir.BoolAttr(attributes["is_host_transfer"]).value:
            if self._refuses_peers:
                raise unimplemented(f"{operation.name}: {_NO_PEERS}")
            return
        channel = hlo.ChannelHandle(attributes["channel_handle"]).handle
        sends = operation.name == SEND
        if channel not in (self._sends if sends else self._receives):
            raise unimplemented(f"{operation.name}: {CALLBACK_ADVICE}")
        arrays = list(operation.operands if sends else operation.results)[:-1]  # the last is a token
        if len(arrays) != 1:
            raise invalid(f"the program must transfer one array on channel {channel} to its host, got {len(arrays)}")
        kind = shard_type(arrays[0].type)
        if self._types.setdefault(channel, kind) != kind:
            raise invalid(f"the program transfers arrays of different types on channel {channel} to its host")

    def types(self, channels: Sequence[int]) -> tuple[ShardType, ...]:
        """Return the types on the given channels. Raise INVALID_ARGUMENT if the module does not use a channel."""
        if unused := [channel for channel in channels if channel not in self._types]:
            raise invalid(f"the program does not use the channels {unused[:10]} of a callback")
        return tuple(self._types[channel] for channel in channels)


@cache
def _dtypes() -> dict[str, str]:
    """Return Atoll's names of dtypes by MLIR's names."""
    from jax._src.interpreters import mlir

    names: dict[str, str] = {}
    with mlir.make_ir_context():
        for name in ("bool", *DTYPE_BITS):  # bool first, because int1 has the same MLIR type
            if name in ("token", "opaque", "string"):
                continue
            try:
                names.setdefault(str(mlir.dtype_to_ir_type(numpy_dtype(name))), name)
            except TypeError:  # JAX does not have this dtype
                continue
    return names
