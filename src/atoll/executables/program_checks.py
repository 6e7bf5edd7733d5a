"""Checks of programs that a client has traced, and of the arguments of runs.

The session does not trust the client for anything that it knows itself: the function of a fingerprint, and the
function's devices, outputs and donated inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from atoll.errors import StatusError, invalid
from atoll.executables.compiled_executables import Executable
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Call, Loop, Node, Program, Route, Switch, Transfer, Unroute, check, consumes
from atoll.ir.row_exchange import check_route
from atoll.ir.types import DTYPE_BITS, NUMBERS, ArraySpec, Even, Replicated, Tiled, shard_boxes, shard_shape
from atoll.ir.validation import MAX_NODES, MAX_VALUES
from atoll.protocol.ifrt import xla_pb2
from atoll.protocol.translation import codec
from atoll.quantities import counted
from atoll.session.cluster_session import ClusterSession

_NO_ARRAYS = ("token", "opaque", "string")


class ProgramChecker:
    """Checks a client's program in one pass, and rewrites it with what the session knows of its functions.

    If `kept` is set, the program is part of a control flow node: it must not consume its first `kept` arguments, and
    may return them.
    """

    def __init__(
        self, program: Program, functions: list[Executable], cluster: ClusterSession, kept: int | None = None
    ) -> None:
        self.program = program
        self.kept = kept or 0
        self.is_part = kept is not None
        self.functions = functions
        self.cluster = cluster
        self.specs: list[ArraySpec] = []
        self.op_shardings: list[bytes | None] = []
        self.consumed: set[int] = set()

    def run(self) -> tuple[Program, list[bytes | None]]:
        """Return the rewritten program, and XLA's form of each value's sharding. Raises INVALID_ARGUMENT."""
        program = self.program
        if len(program.nodes) > MAX_NODES:
            raise invalid(f"a program has {len(program.nodes)} nodes; at most {MAX_NODES} are allowed")
        if program.feeds:
            raise invalid("a client's program cannot have feeds")
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
                case Route() | Unroute():
                    self._route(node)
                case Switch() | Loop() if not self.is_part:
                    node = self._control_flow(node)
                case _:
                    place = "a part of a control flow node" if self.is_part else "a client's program"
                    raise invalid(f"a {type(node).__name__} is not allowed in {place}")
            consumed = consumes(node)
            if any(node.inputs.count(value) > 1 for value in consumed):
                raise invalid(f"program {program.name!r} donates a value and passes it to the same node again")
            self.consumed.update(consumed)
            nodes.append(node)
        count = len(program.arguments)
        if self.consumed.intersection(range(self.kept)):
            raise invalid(f"{program.name!r} is part of control flow, so it cannot consume its arguments")
        returned = program.results
        if not self.is_part and (len(set(returned)) != len(returned) or any(value < count for value in returned)):
            raise invalid(f"program {program.name!r} returns a value twice, or an argument")
        if self.consumed.intersection(program.results):
            raise invalid(f"program {program.name!r} returns a value that it has donated")
        return msgspec.structs.replace(program, nodes=tuple(nodes)), self.op_shardings

    def _define(self, spec: ArraySpec, op_sharding: bytes | None) -> None:
        if len(self.specs) >= MAX_VALUES:
            raise invalid(f"a program has more than {MAX_VALUES} values")
        self.specs.append(spec)
        self.op_shardings.append(op_sharding)

    def _declared(self, spec: ArraySpec) -> None:
        """Check an array type that the client declares. Raises INVALID_ARGUMENT, or RESOURCE_EXHAUSTED."""
        shape, sharding = spec.shape, spec.sharding
        if spec.dtype not in DTYPE_BITS or spec.dtype in _NO_ARRAYS:
            raise invalid(f"invalid dtype {spec.dtype[:40]!r}")
        codec.checked_shape(shape)
        if not sharding.devices or len(set(sharding.devices)) != len(sharding.devices):
            raise invalid("a sharding needs one or more distinct devices")
        self.cluster.hosts_of(sharding.devices)
        if not isinstance(sharding.tiling, Replicated | Tiled):
            raise invalid(f"arrays of a program must be replicated or tiled, not {type(sharding.tiling).__name__}")
        if isinstance(sharding.tiling, Tiled) and len(sharding.tiling.dims) > codec.MAX_RANK + 8:
            raise invalid(
                f"a tile assignment has {len(sharding.tiling.dims)} dimensions, more than {codec.MAX_RANK + 8}"
            )
        shard_boxes(sharding, shape)
        if spec.layout is not None and sorted(spec.layout) != list(range(len(shape))):
            raise invalid(f"the layout {list(spec.layout)} is not a permutation of {counted(len(shape), 'dimension')}")

    def _call(self, node: Call) -> Call:
        name = self.program.name
        if not 0 <= node.function < len(self.functions):
            raise invalid(f"program {name!r} calls function {node.function} of {len(self.functions)}")
        function = self.functions[node.function]
        parameters = function.info.parameters
        if (len(node.inputs), len(node.outputs)) != (len(parameters), len(function.outputs)):
            raise invalid(
                f"program {name!r} calls {function.name} with {counted(len(node.inputs), 'input')} and "
                f"{counted(len(node.outputs), 'output')}, but the function has {len(parameters)} and "
                f"{len(function.outputs)}"
            )
        if node.preserved or node.completion:
            raise invalid("a client cannot set `preserved` and `completion` of a call")
        for position, (value, (dtype, shape)) in enumerate(zip(node.inputs, parameters, strict=True)):
            spec = self.specs[value]
            if spec.dtype != dtype or spec.sharding.devices != function.devices or _shard_shapes(spec) != {shape}:
                raise invalid(
                    f"program {name!r} calls {function.name} with {describe(spec)} as input {position}, "
                    f"but the function takes shards of {dtype}{list(shape)} on devices {list(function.devices)}"
                )
        for declared, actual, info in zip(node.outputs, function.outputs, function.info.outputs, strict=True):
            self._declared(declared)
            if not fits(actual, declared):
                raise invalid(
                    f"program {name!r} expects {describe(declared)} from {function.name}, "
                    f"but the function returns {describe(actual)}"
                )
            # The client chooses the tiling of an output if XLA does not.
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

    def _control_flow(self, node: Switch | Loop) -> Switch | Loop:
        taken = tuple(self.specs[value] for value in node.inputs)
        given: list[list[tuple[ArraySpec, bytes | None]]] = []
        if isinstance(node, Switch):
            if not node.inputs or not node.branches:
                raise invalid(f"program {self.program.name!r} has a switch without an index or without branches")
            _check_number(taken[0])
            branches = []
            for branch in node.branches:
                definition, results = self._part(branch, taken[1:])
                branches.append(definition)
                given.append(results)
            node = msgspec.structs.replace(node, branches=tuple(branches))
        else:
            if not 0 <= node.constants <= len(node.inputs):
                raise invalid(
                    f"program {self.program.name!r} has a loop with {node.constants} constants "
                    f"and {counted(len(node.inputs), 'input')}"
                )
            condition, decides = self._part(node.condition, taken)
            if len(decides) != 1:
                raise invalid(
                    f"{condition.name!r} is the condition of a loop and has {counted(len(decides), 'result')}, not one"
                )
            _check_number(decides[0][0])
            body, results = self._part(node.body, taken, node.constants)
            given = [results, [(spec, None) for spec in body.arguments[node.constants :]]]
            node = msgspec.structs.replace(node, condition=condition, body=body)
        for results in given:
            if [spec for spec, _ in results] != [spec for spec, _ in given[0]]:
                raise invalid(
                    f"the parts of control flow in program {self.program.name!r} return different types: "
                    f"{[describe(spec) for spec, _ in given[0]]} and {[describe(spec) for spec, _ in results]}"
                )
        if len(given[0]) != len(node.outputs):
            raise invalid(
                f"program {self.program.name!r} expects {counted(len(node.outputs), 'result')} from control flow, "
                f"which returns {len(given[0])}"
            )
        for declared, (actual, op_sharding) in zip(node.outputs, given[0], strict=True):
            if not fits(actual, declared):
                raise invalid(
                    f"program {self.program.name!r} expects {describe(declared)} from control flow, "
                    f"which returns {describe(actual)}"
                )
            self._define(actual, op_sharding)
        return msgspec.structs.replace(node, outputs=tuple(spec for spec, _ in given[0]))

    def _part(
        self, program: Program, taken: tuple[ArraySpec, ...], kept: int | None = None
    ) -> tuple[Program, list[tuple[ArraySpec, bytes | None]]]:
        """Check a program of a control flow node. Return it with its results and XLA's form of their shardings."""
        if len(program.arguments) != len(taken) or not all(map(fits, taken, program.arguments)):
            raise invalid(
                f"{program.name!r} takes {list(map(describe, program.arguments))}, got {list(map(describe, taken))}"
            )
        checker = ProgramChecker(program, self.functions, self.cluster, len(taken) if kept is None else kept)
        definition, op_shardings = checker.run()
        return definition, [
            (checker.specs[value], op_shardings[value] or op_sharding(checker.specs[value]))
            for value in program.results
        ]

    def _route(self, node: Route | Unroute) -> None:
        for target in node.outputs:
            self._declared(target)
            self._define(target, op_sharding(target))
        inputs = [self.specs[value] for value in node.inputs]
        check_route(inputs, node.outputs, node.groups, is_back=isinstance(node, Unroute))

    def _transfer(self, node: Transfer) -> None:
        if not node.reshard:
            raise invalid("transfers of a client's program must have `reshard` set")
        for value, target in zip(node.inputs, node.outputs, strict=True):
            self._declared(target)
            source = self.specs[value]
            if (source.dtype, source.shape) != (target.dtype, target.shape):
                raise invalid(f"a transfer cannot change {describe(source)} to {describe(target)}")
            shard_boxes(source.sharding, source.shape)
            self._define(target, op_sharding(target))


def _check_number(spec: ArraySpec) -> None:
    if spec.shape or spec.dtype not in NUMBERS:
        raise invalid(
            f"a switch or loop is controlled by one integer or boolean, not by {spec.dtype}{list(spec.shape)}"
        )


def _shard_shapes(spec: ArraySpec) -> set[tuple[int, ...]]:
    return {shard_shape(spec.sharding, spec.shape, i) for i in range(len(spec.sharding.devices))}


def fits(given: ArraySpec, expected: ArraySpec) -> bool:
    """Return whether two array types have the same shards, as far as known, so that one may replace the other."""
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


def describe(spec: ArraySpec) -> str:
    return f"{spec.dtype}{list(spec.shape)} on devices {list(spec.sharding.devices)}"


def op_sharding(spec: ArraySpec) -> bytes | None:
    """Return XLA's form of a tiled sharding; empty for other shardings."""
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


class ArgumentTypes:
    """The types of an executable's arguments. `name` is that of the executable, for errors."""

    def __init__(self, name: str, expected: Sequence[ArraySpec]) -> None:
        self._name = name
        self._expected = tuple(expected)
        self._fitting = list(expected)  # by argument, the last type that passed the check

    def check(self, records: Sequence[ArrayRecord]) -> None:
        """Raise INVALID_ARGUMENT unless the arrays fit the arguments."""
        if len(records) != len(self._expected):
            raise invalid(f"{self._name} takes {counted(len(self._expected), 'argument')}, got {len(records)}")
        for i, record in enumerate(records):
            if record.spec is not self._fitting[i]:
                if record.spec is None or not fits(record.spec, self._expected[i]):
                    given = "nothing" if record.spec is None else describe(record.spec)
                    raise invalid(f"{self._name} takes {describe(self._expected[i])} as argument {i}, got {given}")
                self._fitting[i] = record.spec
