"""Executables of compiled functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.errors import Status, invalid
from atoll.executables.compile_requests import CompileJob
from atoll.executables.loaded_executable import MPMD_ERROR, NO_LAYOUTS, LoadedExecutable
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Call, Program, single
from atoll.ir.types import ArraySpec, Even, Replicated, Sharding, Tiled
from atoll.protocol.ifrt import executables_pb2, xla_pb2
from atoll.protocol.messages import FunctionInfo, OutputInfo, QueryKind
from atoll.protocol.translation import codec
from atoll.protocol.translation.array_specs import layout_proto_from_text, order_of_layout
from atoll.protocol.translation.shardings import has_partial_sums, partial_sums, sharding_to, tiles_from
from atoll.quantities import counted
from atoll.session.cluster_session import ClusterSession


def _fingerprint(info: FunctionInfo, job: CompileJob) -> bytes:
    """Return a fingerprint of the computation, its devices and its shardings.

    XLA's fingerprint does not include devices and shardings.
    """
    identity = (
        info.fingerprint or job.content,
        job.assignment,
        info.parameters,
        info.parameter_shardings,
        info.outputs,
        info.donated,
        job.callbacks,
    )
    return hashlib.sha256(msgspec.msgpack.encode(identity)).hexdigest().encode()


class Executable(LoadedExecutable):
    """A compiled function of the session."""

    def __init__(self, function: int, info: FunctionInfo, job: CompileJob) -> None:
        super().__init__()
        self.function = function
        self.info = info
        self.name = info.name
        self.assignment = job.assignment
        self.devices = job.devices
        self.fingerprint = _fingerprint(info, job)
        self.functions = (function,)
        self.callbacks = job.callbacks
        self.outputs = tuple(self._output(output) for output in info.outputs)
        self.donated = frozenset(info.donated)

    def _output(self, output: OutputInfo) -> ArraySpec:
        count = len(self.devices)
        shape = output.shape
        tiling: Any = Replicated()
        if count > 1:
            if output.op_sharding is not None:
                op = xla_pb2.OpSharding.FromString(output.op_sharding)
                tiling = tiles_from(op, count, output.shape)
            else:
                op, tiling = None, Even(output.shape)
            if isinstance(tiling, Tiled):
                shape = tuple(size * parts for size, parts in zip(output.shape, tiling.dims, strict=False))
            if op is not None and has_partial_sums(op):
                tiling = partial_sums(tiling, shape)
        layout = order_of_layout(output.layout.decode()) if output.layout else None
        return ArraySpec(output.dtype, shape, Sharding(self.devices, tiling, output.memory_kind), layout)

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        """Check the number of arguments. The worker checks their types."""
        if len(arguments) != len(self.info.parameters):
            raise invalid(f"{self.name} takes {counted(len(self.info.parameters), 'argument')}, got {len(arguments)}")

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        arguments = tuple(
            ArraySpec(dtype, shape, Sharding(self.devices, Even(shape))) for dtype, shape in self.info.parameters
        )
        call = Call(
            self.function,
            tuple(range(len(arguments))),
            self.outputs,
            self.devices,
            tuple(i for i in self.info.donated if i not in preserved),
            tuple(i for i in self.info.donated if i in preserved),
            completion,
        )
        return single(self.info.name, arguments, call)

    # ---- queries of JAX

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        fill_costs(await cluster.inquire(QueryKind.COST, self.devices[0], self.function), reply)

    async def text(self, cluster: ClusterSession) -> str:
        return (await cluster.inquire(QueryKind.TEXT, self.devices[0], self.function)).decode()

    def metadata_reply(self) -> Any:
        info = self.info
        reply = executables_pb2.ExecutableMetadataReply()
        if info.parameter_shardings is not None:
            reply.parameter_shardings.SetInParent()
            for each in info.parameter_shardings:
                reply.parameter_shardings.shardings.append(xla_pb2.OpSharding.FromString(each))
        if all(output.op_sharding is not None for output in info.outputs):
            reply.output_shardings.SetInParent()
            for output in info.outputs:
                reply.output_shardings.shardings.append(xla_pb2.OpSharding.FromString(output.op_sharding))
        if len(info.parameter_layouts) == len(info.parameters):
            reply.parameter_layouts_list.SetInParent()
            for text in info.parameter_layouts:
                reply.parameter_layouts_list.layouts.append(layout_proto_from_text(text.decode()))
        else:
            reply.parameter_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
        if all(output.layout for output in info.outputs):
            reply.output_layouts_list.SetInParent()
            for output in info.outputs:
                reply.output_layouts_list.layouts.append(layout_proto_from_text(output.layout.decode()))
        else:
            reply.output_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
        kinds = reply.output_memory_kinds.memory_kind_lists.add()
        kinds.memory_kinds.extend(output.memory_kind for output in info.outputs)
        reply.donated_input_indices.SetInParent()
        reply.donated_input_indices.donated_input_indices.extend(info.donated)
        reply.compiled_memory_stats.SetInParent()
        for name, value in info.memory_stats.items():
            setattr(reply.compiled_memory_stats, name, value)
        reply.mpmd_compiled_memory_stats_error.CopyFrom(codec.status_to(MPMD_ERROR))
        reply.size_of_generated_code_in_bytes = info.generated_code_bytes
        return reply

    def output_sharding(self, position: int) -> Any:
        spec = self.outputs[position]
        return sharding_to(spec.sharding, spec.shape, self.info.outputs[position].op_sharding)


class LostExecutable(Executable):
    """A function for lost devices. Its types come from a compilation for other devices.

    Runs fail like those of functions that were compiled before the loss: the returned arrays contain the error.
    Google's server compiles without the devices, so scripts that probe devices expect errors only when they wait.
    """

    def __init__(self, info: FunctionInfo, job: CompileJob, loss: Status) -> None:
        super().__init__(0, info, job)
        self.functions = ()
        self.loss = loss

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        self.loss.raise_if_error()

    async def text(self, cluster: ClusterSession) -> str:
        self.loss.raise_if_error()
        return ""


def fill_costs(payload: bytes, reply: Any) -> None:
    """Fill a cost analysis reply from a worker's JSON."""
    reply.attributes.SetInParent()  # also if XLA knows no costs
    for name, value in json.loads(payload).items():
        reply.attributes.attributes[name].float_value = float(value)
