"""Programs that a client has traced: many compiled functions and transfers, run by one request.

A client's word is taken for nothing that the session knows itself: which function a fingerprint stands for, on which
devices it runs, what it gives, and which of its inputs it consumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from atoll.errors import Code, Status, StatusError, invalid, unimplemented
from atoll.frontends.ifrt import codec
from atoll.frontends.ifrt.arrays import ArrayRecord
from atoll.frontends.ifrt.executables import MPMD_ERROR, NO_LAYOUTS, Executable, Loaded
from atoll.frontends.session.session import ClusterSession
from atoll.ir.program import Call, Node, Program, Transfer, check, output_count
from atoll.ir.submission import Staging, Submission, decode
from atoll.ir.types import DTYPE_BITS, ArraySpec, Even, Replicated, Tiled, shard_boxes, shard_shape
from atoll.protocol.ifrt import executables_pb2, xla_pb2

MAX_NODES = 1 << 16
MAX_VALUES = 1 << 20
# A run takes one credit of its session's window for so many nodes: the controller keeps 1 KB for each node.
NODES_PER_CREDIT = 128
_NO_ARRAYS = ("token", "opaque", "string")
_NOTHING_RUNS = "staged arguments wait for their program; nothing runs here"
_ASK_THE_FUNCTIONS = "a program has no cost of its own: ask the functions that it calls (Compiled.cost_analysis() does)"


def read(data: bytes, loaded: Iterable[Loaded], cluster: ClusterSession) -> Loaded:
    """What a client has submitted, checked. Raises INVALID_ARGUMENT where it makes no sense.

    `loaded` are the session's executables, which programs may name by their fingerprints.
    """
    submission = decode(data)
    if isinstance(submission, Staging):
        return StagingExecutable(submission, cluster)
    return ProgramExecutable(submission, loaded, cluster)


class ProgramExecutable(Loaded):
    """A traced program of the session. Raises INVALID_ARGUMENT from the constructor."""

    def __init__(self, submission: Submission, loaded: Iterable[Loaded], cluster: ClusterSession) -> None:
        super().__init__()
        known = {each.fingerprint: each for each in loaded if isinstance(each, Executable)}
        functions = []
        for fingerprint in submission.functions:
            executable = known.get(fingerprint)
            if executable is None:
                raise invalid(f"a program calls function {fingerprint[:80]!r}, which this session has not compiled")
            functions.append(executable)
        self.definition, self._op_shardings = _Checker(submission.program, functions, cluster).run()
        self.name = self.definition.name
        self.credits = 1 + len(self.definition.nodes) // NODES_PER_CREDIT
        self.fingerprint = b""
        self.functions = tuple({each.function: None for each in functions})
        specs = _values(self.definition)
        if not specs:
            raise invalid(f"program {self.name!r} is empty")
        self.outputs = tuple(specs[value] for value in self.definition.results)
        # For jaxlib's client: as many as the arguments that come with the run have shards.
        self.devices = specs[len(self.definition.arguments) - 1 if self.definition.arguments else 0].sharding.devices
        consumed = {value for node in self.definition.nodes for value in _consumes(node)}
        self.donated = frozenset(i for i in range(len(self.definition.arguments)) if i in consumed)
        self._seen: list[ArraySpec] = list(self.definition.arguments)  # what is known to fit, by argument

    def gather(self, staged: list[int], arguments: list[int]) -> list[int]:
        every = [*staged, *arguments]
        staged.clear()
        return every

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        expected = self.definition.arguments
        if len(arguments) != len(expected):
            raise invalid(f"program {self.name!r} takes {len(expected)} arguments, got {len(arguments)}")
        for i, record in enumerate(arguments):
            if record.spec is not self._seen[i]:
                if record.spec is None or not _fits(record.spec, expected[i]):
                    raise invalid(
                        f"program {self.name!r} takes {_describe(expected[i])} as argument {i}, "
                        f"got {_describe(record.spec) if record.spec else 'nothing'}"
                    )
                self._seen[i] = record.spec

    def program(self, preserved: frozenset[int], completion: bool) -> Program:
        nodes = tuple(_preserving(node, preserved) for node in self.definition.nodes)
        if not completion:
            return msgspec.structs.replace(self.definition, nodes=nodes)
        # The calls on which no other node waits end last. Their completions are values, so those after them move.
        used = {value for node in nodes for value in node.inputs}
        moved = list(range(len(self.definition.arguments)))
        completed: list[Node] = []
        completions = []
        total = len(moved)
        first = total
        for node in nodes:
            outputs = range(first, first + len(node.outputs))
            first = outputs.stop
            node = msgspec.structs.replace(node, inputs=tuple(moved[value] for value in node.inputs))
            if isinstance(node, Call) and used.isdisjoint(outputs):
                node = msgspec.structs.replace(node, completion=True)
                completions.append(total + len(node.outputs))
            moved.extend(range(total, total + len(node.outputs)))
            total += output_count(node)
            completed.append(node)
        results = (*(moved[value] for value in self.definition.results), *completions)
        return msgspec.structs.replace(self.definition, nodes=tuple(completed), results=results)

    def awaited(self, handles: Sequence[int], completions: Sequence[int]) -> tuple[int, ...]:
        return (*handles, *completions)

    # ---- what JAX asks

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise unimplemented(_ASK_THE_FUNCTIONS)

    async def text(self, cluster: ClusterSession) -> str:
        return "\n".join(str(node) for node in self.definition.nodes)

    def metadata_reply(self) -> Any:
        return _metadata_reply([output.sharding.memory_kind for output in self.outputs], sorted(self.donated))

    def output_replies(self, handles: list[int]) -> list[Any]:
        return [
            executables_pb2.ExecuteReply.Output(
                dtype=codec.dtype_to(spec.dtype),
                shape={"dims": spec.shape},
                sharding=codec.sharding_to(spec.sharding, spec.shape, self._op_shardings[value]),
                array=handle,
            )
            for value, spec, handle in zip(self.definition.results, self.outputs, handles, strict=True)
        ]


class StagingExecutable(Loaded):
    """Keeps its arguments for the program that is run next; see `atoll.ir.submission`."""

    def __init__(self, submission: Staging, cluster: ClusterSession) -> None:
        super().__init__()
        cluster.hosts_of(submission.devices)
        if not submission.devices or len(set(submission.devices)) != len(submission.devices):
            raise invalid("arguments are staged by devices, each once")
        self.name = "staging"
        self.devices = submission.devices
        self.fingerprint = b""
        self.functions = ()
        self.outputs = ()
        self.donated = frozenset()

    def gather(self, staged: list[int], arguments: list[int]) -> None:
        if len(staged) + len(arguments) > MAX_VALUES:
            staged.clear()
            raise invalid(f"more than {MAX_VALUES} arguments of one program")
        staged.extend(arguments)

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        raise unimplemented(_NOTHING_RUNS)

    def program(self, preserved: frozenset[int], completion: bool) -> Program:
        raise unimplemented(_NOTHING_RUNS)

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise unimplemented(_NOTHING_RUNS)

    async def text(self, cluster: ClusterSession) -> str:
        raise unimplemented(_NOTHING_RUNS)

    def metadata_reply(self) -> Any:
        return _metadata_reply((), ())

    def output_replies(self, handles: list[int]) -> list[Any]:
        return []


class _Checker:
    """Goes through a client's program once; gives it as the session knows it, and XLA's form of each sharding."""

    def __init__(self, program: Program, functions: list[Executable], cluster: ClusterSession) -> None:
        self.program = program
        self.functions = functions
        self.cluster = cluster
        self.specs: list[ArraySpec] = []
        self.op_shardings: list[bytes | None] = []
        self.consumed: set[int] = set()

    def run(self) -> tuple[Program, list[bytes | None]]:
        program = self.program
        if len(program.nodes) > MAX_NODES:
            raise invalid(f"a program of {len(program.nodes)} nodes; at most {MAX_NODES} are allowed")
        if program.feeds:
            raise invalid("a client's program exchanges nothing with its host")
        check(program)
        for spec in program.arguments:
            self._declared(spec)
            self._define(spec, None)
        nodes: list[Node] = []
        for node in program.nodes:
            for value in node.inputs:
                if value in self.consumed:
                    raise invalid(f"program {program.name!r} uses value {value} after it was donated")
            match node:
                case Call():
                    node = self._call(node)
                case Transfer():
                    self._transfer(node)
                case _:
                    raise invalid(f"a client's program has calls and transfers, no {type(node).__name__}")
            consumes = _consumes(node)
            if any(node.inputs.count(value) > 1 for value in consumes):
                raise invalid(f"program {program.name!r} donates a value and passes it to the same node once more")
            self.consumed.update(consumes)
            nodes.append(node)
        count = len(program.arguments)
        if len(set(program.results)) != len(program.results) or any(value < count for value in program.results):
            raise invalid(f"program {program.name!r} returns a value twice, or an argument")
        if self.consumed.intersection(program.results):
            raise invalid(f"program {program.name!r} returns a value that it has donated")
        return msgspec.structs.replace(program, nodes=tuple(nodes)), self.op_shardings

    def _define(self, spec: ArraySpec, op_sharding: bytes | None) -> None:
        if len(self.specs) >= MAX_VALUES:
            raise invalid(f"a program of more than {MAX_VALUES} values")
        self.specs.append(spec)
        self.op_shardings.append(op_sharding)

    def _declared(self, spec: ArraySpec) -> None:
        """Raises INVALID_ARGUMENT for an array that cannot be."""
        shape, sharding = spec.shape, spec.sharding
        if spec.dtype not in DTYPE_BITS or spec.dtype in _NO_ARRAYS:
            raise invalid(f"no such dtype: {spec.dtype[:40]!r}")
        if len(shape) > codec.MAX_RANK or min(shape, default=0) < 0 or math.prod(shape) > codec.MAX_ELEMENTS:
            raise invalid(f"no such shape: {list(shape[: codec.MAX_RANK])}")
        if not sharding.devices or len(set(sharding.devices)) != len(sharding.devices):
            raise invalid("a sharding needs devices, each once")
        self.cluster.hosts_of(sharding.devices)
        if not isinstance(sharding.tiling, Replicated | Tiled):
            raise invalid("a program's arrays are replicated or tiled")
        if isinstance(sharding.tiling, Tiled) and len(sharding.tiling.dims) > codec.MAX_RANK + 8:
            raise invalid(f"a tile assignment of {len(sharding.tiling.dims)} dimensions")
        shard_boxes(sharding, shape)
        if spec.layout is not None and sorted(spec.layout) != list(range(len(shape))):
            raise invalid("a layout that is no order of the dimensions")

    def _call(self, node: Call) -> Call:
        name = self.program.name
        if not 0 <= node.function < len(self.functions):
            raise invalid(f"program {name!r} calls function {node.function} of {len(self.functions)}")
        function = self.functions[node.function]
        parameters = function.info.parameters
        if (len(node.inputs), len(node.outputs)) != (len(parameters), len(function.outputs)):
            raise invalid(
                f"program {name!r} calls {function.name} with {len(node.inputs)} inputs and {len(node.outputs)} "
                f"outputs, where it has {len(parameters)} and {len(function.outputs)}"
            )
        if node.preserved or node.completion:
            raise invalid("what a call preserves, and that it tells its end, is for the server to say")
        for position, (value, (dtype, shape)) in enumerate(zip(node.inputs, parameters, strict=True)):
            spec = self.specs[value]
            if spec.dtype != dtype or spec.sharding.devices != function.devices or _shard_shapes(spec) != {shape}:
                raise invalid(
                    f"program {name!r} calls {function.name} with {_describe(spec)} as input {position}, "
                    f"where it takes shards of {dtype}{list(shape)} on devices {list(function.devices)}"
                )
        for declared, actual, info in zip(node.outputs, function.outputs, function.info.outputs, strict=True):
            self._declared(declared)
            if not _fits(actual, declared):
                raise invalid(
                    f"program {name!r} takes {_describe(declared)} from {function.name}, "
                    f"which gives {_describe(actual)}"
                )
            # Where an output's shards lie is the client's to say if XLA does not.
            tiling = declared.sharding.tiling if isinstance(actual.sharding.tiling, Even) else actual.sharding.tiling
            sharding = msgspec.structs.replace(actual.sharding, tiling=tiling)
            self._define(msgspec.structs.replace(actual, sharding=sharding), info.op_sharding)
        may = set(node.donated)
        return Call(
            function.function,
            node.inputs,
            tuple(self.specs[-len(function.outputs) :]) if function.outputs else (),
            function.devices,
            tuple(i for i in function.info.donated if i in may),
            tuple(i for i in function.info.donated if i not in may),
        )

    def _transfer(self, node: Transfer) -> None:
        if not node.reshard:
            raise invalid("a client's program reshards what it transfers")
        for value, target in zip(node.inputs, node.outputs, strict=True):
            self._declared(target)
            source = self.specs[value]
            if (source.dtype, source.shape) != (target.dtype, target.shape):
                raise invalid(f"a transfer cannot change {_describe(source)} to {_describe(target)}")
            shard_boxes(source.sharding, source.shape)
            self._define(target, _op_sharding(target))


def _metadata_reply(memory_kinds: Sequence[str], donated: Sequence[int]) -> Any:
    reply = executables_pb2.ExecutableMetadataReply()
    reply.parameter_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
    reply.output_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
    kinds = reply.output_memory_kinds.memory_kind_lists.add()
    kinds.memory_kinds.extend(memory_kinds)
    reply.donated_input_indices.SetInParent()
    reply.donated_input_indices.donated_input_indices.extend(donated)
    no_stats = Status(Code.UNIMPLEMENTED, "a program's memory is that of its functions and of its arrays")
    reply.compiled_memory_stats_error.CopyFrom(codec.status_to(no_stats))
    reply.mpmd_compiled_memory_stats_error.CopyFrom(codec.status_to(MPMD_ERROR))
    return reply


def _values(definition: Program) -> list[ArraySpec]:
    return [*definition.arguments, *(spec for node in definition.nodes for spec in node.outputs)]


def _consumes(node: Node) -> tuple[int, ...]:
    if isinstance(node, Call):
        return tuple(node.inputs[i] for i in node.donated)
    return node.inputs if isinstance(node, Transfer) and node.donate else ()


def _preserving(node: Node, kept: frozenset[int]) -> Node:
    """The node without consuming these arguments of its program."""
    if not kept.intersection(_consumes(node)):
        return node
    if isinstance(node, Call):
        donated = tuple(i for i in node.donated if node.inputs[i] not in kept)
        preserved = tuple(sorted({*node.preserved, *node.donated} - set(donated)))
        return msgspec.structs.replace(node, donated=donated, preserved=preserved)
    return msgspec.structs.replace(node, donate=False)


def _shard_shapes(spec: ArraySpec) -> set[tuple[int, ...]]:
    return {shard_shape(spec.sharding, spec.shape, i) for i in range(len(spec.sharding.devices))}


def _fits(given: ArraySpec, expected: ArraySpec) -> bool:
    """Whether an array may stand where another one was announced: the same shards, as far as anybody can tell."""
    if (given.dtype, given.shape) != (expected.dtype, expected.shape):
        return False
    if given.sharding.devices != expected.sharding.devices:
        return False
    if given.sharding == expected.sharding:
        return True
    try:
        if isinstance(given.sharding.tiling, Even):
            return _shard_shapes(given) == _shard_shapes(expected)
        return shard_boxes(given.sharding, given.shape) == shard_boxes(expected.sharding, expected.shape)
    except StatusError:
        return False


def _describe(spec: ArraySpec) -> str:
    return f"{spec.dtype}{list(spec.shape)} on devices {list(spec.sharding.devices)}"


def _op_sharding(spec: ArraySpec) -> bytes | None:
    """XLA's own form of a sharding over several devices."""
    tiling = spec.sharding.tiling
    if not isinstance(tiling, Tiled):
        return b""
    rank = len(spec.shape)
    replicas = math.prod(tiling.dims[rank:])
    return bytes(
        xla_pb2.OpSharding(
            type=xla_pb2.OpSharding.OTHER,
            tile_assignment_dimensions=(*tiling.dims[:rank], *((replicas,) if replicas > 1 else ())),
            tile_assignment_devices=tiling.order,
            replicate_on_last_tile_dim=replicas > 1,
        ).SerializeToString()
    )
