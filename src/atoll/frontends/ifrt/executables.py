"""Executables: from a compile request to what JAX queries of one, and the program that runs it."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.errors import Code, Status, invalid, unimplemented
from atoll.frontends.ifrt import codec
from atoll.frontends.ifrt.arrays import ArrayRecord
from atoll.frontends.ifrt.devices import cost_attributes
from atoll.frontends.session.session import ClusterSession
from atoll.ir.program import Call, Program, single
from atoll.ir.types import ArraySpec, Even, Replicated, Sharding, Tiled
from atoll.protocol.ifrt import compile_pb2, executables_pb2, xla_pb2
from atoll.protocol.messages import FunctionInfo, FunctionSource, OutputInfo

XLA_PROGRAM = "xla::ifrt::XlaProgram"
PLUGIN_PROGRAM = "xla::ifrt::PluginProgram"
_PLUGIN_PREFIX = b"__serialized_plugin_program "
CALLBACK_ADVICE = (
    "this program calls back into the client's Python (jax.pure_callback, io_callback, debug.print or debug.callback), "
    "which jaxlib's IFRT proxy client cannot serve; return the values and use them outside of jit, or run that part on "
    "a local CPU device (JAX_PLATFORMS=atoll,cpu)"
)
NO_LAYOUTS = Status(Code.UNIMPLEMENTED, "XLA tells no layouts where there are tokens among the arrays")
MPMD_ERROR = Status(Code.INVALID_ARGUMENT, "this executable runs on one mesh: it is no MPMD executable")


@dataclass(frozen=True)
class CompileJob:
    """What a compile request asks for, checked."""

    source: bytes  # a FunctionSource
    content: str  # its hash, with the devices left out
    assignment: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for partitions in self.assignment for device in partitions)


def plugin_payload(program: Any) -> bytes:
    """What a client has put into a plugin program; empty for programs of other kinds."""
    return program.data.removeprefix(_PLUGIN_PREFIX) if program.type_name == PLUGIN_PROGRAM else b""


def compile_job(request: Any, device_count: int) -> CompileJob:
    """Reads a Compile request. Raises INVALID_ARGUMENT or UNIMPLEMENTED."""
    kind = request.program.type_name
    if kind == PLUGIN_PROGRAM:
        text = plugin_payload(request.program).decode(errors="replace")
        raise invalid(f"unknown plugin program {text[:200]!r}: this server runs XLA programs")
    if kind != XLA_PROGRAM:
        raise unimplemented(f"programs of kind {kind[:100]!r} are not supported; this server runs XLA programs")
    if request.host_callbacks:
        raise unimplemented(CALLBACK_ADVICE)
    options = codec.parse(compile_pb2.XlaCompileOptions, request.compile_options.data)
    build = options.compile_options.executable_build_options
    replicas, partitions = max(1, build.num_replicas), max(1, build.num_partitions)
    if build.HasField("device_assignment"):
        assignment = _assignment(build.device_assignment)
    else:
        assignment = default_assignment(replicas, partitions, device_count)
    if (len(assignment), len(assignment[0])) != (replicas, partitions):
        raise invalid(f"a device assignment of {len(assignment)} replicas for a program of {replicas}")
    flat = [device for row in assignment for device in row]
    if len(set(flat)) != len(flat) or not all(0 <= device < device_count for device in flat):
        raise invalid(f"a device assignment names a device twice, or one of {flat} does not exist")
    build.ClearField("device_assignment")
    source = FunctionSource(request.program.data, options.compile_options.SerializeToString(deterministic=True))
    encoded = msgspec.msgpack.encode(source)
    return CompileJob(encoded, hashlib.sha256(encoded).hexdigest(), assignment)


def _assignment(proto: Any) -> tuple[tuple[int, ...], ...]:
    replicas, partitions = proto.replica_count, proto.computation_count
    rows = proto.computation_devices
    agree = len(rows) == partitions and all(len(row.replica_device_ids) == replicas for row in rows)
    if min(replicas, partitions) < 1 or not agree:
        raise invalid("a device assignment whose counts do not agree")
    return tuple(tuple(int(rows[p].replica_device_ids[r]) for p in range(partitions)) for r in range(replicas))


def default_assignment(replicas: int, partitions: int, device_count: int) -> tuple[tuple[int, ...], ...]:
    """The first devices in order: [replica][partition]."""
    if not 0 < replicas * partitions <= device_count:
        raise invalid(f"{replicas} replicas of {partitions} partitions do not fit {device_count} devices")
    return tuple(tuple(r * partitions + p for p in range(partitions)) for r in range(replicas))


class Loaded(abc.ABC):
    """What a session can run by a handle: a compiled function, or a program of several.

    `functions` are those that the session keeps for as long as it has this, each once. A run may also give completions,
    which are no arrays: they come after `outputs`.
    """

    name: str
    devices: tuple[int, ...]
    fingerprint: bytes  # names it to programs of the same session
    functions: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    donated: frozenset[int]

    def __init__(self) -> None:
        # The registered programs that run it and how many completions they give, by what the caller keeps and whether
        # it asks for the run's status.
        self.programs: dict[tuple[frozenset[int], bool], tuple[int, int]] = {}
        self.credits = 1  # of the session's window, that a run takes

    def unloaded(self, cluster: ClusterSession) -> None:
        """The session has released it."""
        return None

    def gather(self, staged: list[int], arguments: list[int]) -> list[int] | None:
        """The handles of all arguments of a run, of which some may be staged; None where this was staging only."""
        return arguments

    @abc.abstractmethod
    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        """Raises INVALID_ARGUMENT where it cannot be run on these."""

    @abc.abstractmethod
    def program(self, preserved: frozenset[int], completion: bool) -> Program:
        """The program that runs it; the caller keeps the `preserved` of `donated`."""

    def awaited(self, handles: Sequence[int], completions: Sequence[int]) -> tuple[int, ...]:
        """Which of a run's results show, together, that it has ended."""
        return tuple(completions)

    @abc.abstractmethod
    def metadata_reply(self) -> Any: ...

    @abc.abstractmethod
    def output_replies(self, handles: list[int]) -> list[Any]:
        """The outputs as the first run describes them."""

    @abc.abstractmethod
    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        """Fills in XLA's estimates. Raises StatusError."""

    @abc.abstractmethod
    async def text(self, cluster: ClusterSession) -> str:
        """What it looks like, for people. Raises StatusError."""

    def compile_reply(self, handle: int, ready_future: int) -> Any:
        return executables_pb2.CompileReply(
            executable=handle,
            name=self.name,
            num_devices=len(self.devices),
            device_ids=self.devices,
            addressable_device_ids=self.devices,
            fingerprint_value=self.fingerprint,
            ready_future_handle=ready_future,
        )


def _fingerprint(info: FunctionInfo, job: CompileJob) -> bytes:
    """The same for what does the same on the same devices, wherever in a script it stands.

    XLA's own leaves out the devices, and how the shards make up an array.
    """
    identity = (
        info.fingerprint or job.content,
        job.assignment,
        info.parameters,
        info.parameter_shardings,
        info.outputs,
        info.donated,
    )
    return hashlib.sha256(msgspec.msgpack.encode(identity)).hexdigest().encode()


class Executable(Loaded):
    """A compiled function of the session."""

    def __init__(self, function: int, info: FunctionInfo, job: CompileJob) -> None:
        super().__init__()
        self.function = function
        self.info = info
        self.name = info.name
        self.devices = job.devices
        self.fingerprint = _fingerprint(info, job)
        self.functions = (function,)
        self.outputs = tuple(self._output(output) for output in info.outputs)
        self.donated = frozenset(info.donated)

    def _output(self, output: OutputInfo) -> ArraySpec:
        count = len(self.devices)
        shape = output.shape
        tiling: Any = Replicated()
        if count > 1:
            if output.op_sharding is not None:
                tiling = codec.tiling_from(xla_pb2.OpSharding.FromString(output.op_sharding), count, output.shape)
            else:
                tiling = Even(output.shape)
            if isinstance(tiling, Tiled):
                shape = tuple(size * parts for size, parts in zip(output.shape, tiling.dims, strict=False))
        layout = codec.order_of_layout(output.layout.decode()) if output.layout else None
        return ArraySpec(output.dtype, shape, Sharding(self.devices, tiling, output.memory_kind), layout)

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        """Counts; the worker checks the rest."""
        if len(arguments) != len(self.info.parameters):
            raise invalid(f"{self.name} takes {len(self.info.parameters)} arguments, got {len(arguments)}")

    def program(self, preserved: frozenset[int], completion: bool) -> Program:
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

    # ---- what JAX asks

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        cost_attributes(await cluster.inquire("cost", self.devices[0], self.function), reply)

    async def text(self, cluster: ClusterSession) -> str:
        return (await cluster.inquire("text", self.devices[0], self.function)).decode()

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
                reply.parameter_layouts_list.layouts.append(codec.layout_proto_from_text(text.decode()))
        else:
            reply.parameter_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
        if all(output.layout for output in info.outputs):
            reply.output_layouts_list.SetInParent()
            for output in info.outputs:
                reply.output_layouts_list.layouts.append(codec.layout_proto_from_text(output.layout.decode()))
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

    def output_replies(self, handles: list[int]) -> list[Any]:
        return [
            executables_pb2.ExecuteReply.Output(
                dtype=codec.dtype_to(spec.dtype),
                shape={"dims": spec.shape},
                sharding=codec.sharding_to(spec.sharding, spec.shape, output.op_sharding),
                array=handle,
            )
            for spec, output, handle in zip(self.outputs, self.info.outputs, handles, strict=True)
        ]
