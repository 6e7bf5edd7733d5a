"""Tests of random programs of many nodes: lowered with and without simplification, they give the nodes' results."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.ir.cut import cut
from atoll.ir.lowering import lower
from atoll.ir.passes.simplify_pass import simplify
from atoll.ir.place import place
from atoll.ir.plan import Lowered
from atoll.ir.program import Call, Mapping, Node, Program, Rearrange, Transfer
from atoll.ir.steps import finish
from atoll.ir.text import render
from atoll.ir.types import ArraySpec, Sharding, shard_boxes, shard_shape
from tests.ir.machine import Machine, Placement, cluster, compute, contents, counting, slices
from tests.ir.program_text import parse
from tests.ir.test_types import tilings

SHAPE = (4, 3)


@dataclass
class Case:
    placement: Placement
    program: Program
    functions: dict[int, str]
    outputs: dict[str, tuple[ArraySpec, ...]] = field(default_factory=dict)


@dataclass
class Written:
    """Program under construction, with the contents of its values, and the values that may still be used."""

    specs: list[ArraySpec | None]
    memory: list[int]  # values with the same number share memory
    ended: set[int] = field(default_factory=set)  # donated numbers
    nodes: list[Node] = field(default_factory=list)

    def usable(self) -> list[int]:
        return [v for v, spec in enumerate(self.specs) if spec is not None and self.memory[v] not in self.ended]

    def add(self, node: Node, specs: list[ArraySpec | None], views: int | None = None) -> None:
        self.nodes.append(node)
        for spec in specs:
            self.memory.append(len(self.specs) if views is None else self.memory[views])
            self.specs.append(spec)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Generate chains of calls, transfers and views on few kinds of arrays, so that many can be simplified."""
    placement = cluster(draw(st.integers(1, 2)), draw(st.integers(1, 2)), 2)
    meshes = []
    for _ in range(draw(st.integers(1, 3))):
        island = draw(st.sampled_from(sorted({location.island for location in placement.values()})))
        devices = [d for d, location in placement.items() if location.island == island]
        meshes.append(tuple(draw(st.permutations(devices))[: draw(st.integers(1, len(devices)))]))
    kinds = [
        ArraySpec("int64", SHAPE, Sharding(mesh, tiling, draw(st.sampled_from(["", "", "pinned_host"]))))
        for mesh in meshes
        for tiling in [draw(tilings(len(mesh), len(SHAPE)))]
    ]
    arguments = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)))
    case = Case(placement, Program("f", arguments, (), ()), {})
    written = Written([*arguments], [*range(len(arguments))])
    for number in range(draw(st.integers(1, 10))):
        usable = written.usable()
        if not usable:
            break
        value = draw(st.sampled_from(usable))
        spec = written.specs[value]
        assert spec is not None
        match draw(st.sampled_from(["call", "reshard", "reshard", "copy", "view"])):
            case "call":
                _call(draw, case, written, number, spec, kinds)
            case "reshard" if spec.shape == SHAPE:
                several = [v for v in usable if written.specs[v].shape == SHAPE]  # type: ignore[union-attr]
                inputs = tuple(draw(st.lists(st.sampled_from(several), min_size=1, max_size=2)))
                _transfer(draw, written, inputs, [draw(st.sampled_from(kinds)) for _ in inputs], reshard=True)
            case "view" if spec.shape == SHAPE:
                shard = draw(st.integers(0, len(spec.sharding.devices) - 1))
                sharding = Sharding((spec.sharding.devices[shard],), memory_kind=spec.sharding.memory_kind)
                part = ArraySpec("int64", shard_shape(spec.sharding, SHAPE, shard), sharding)
                mapping = Mapping(0, 0, (shard, shard + 1, 1), (0, 1, 1))
                written.add(Rearrange((value,), (part,), (mapping,)), [part], views=value)
            case _:
                count = len(spec.sharding.devices)
                mesh = draw(st.sampled_from([spec.sharding.devices, *(m for m in meshes if len(m) == count)]))
                sharding = Sharding(mesh, spec.sharding.tiling, spec.sharding.memory_kind)
                _transfer(draw, written, (value,), [ArraySpec("int64", spec.shape, sharding)], reshard=False)
    made = [v for v in written.usable() if v >= len(arguments)]
    results = draw(st.lists(st.sampled_from(made), unique=True)) if made else []
    case.program = Program("f", arguments, tuple(written.nodes), tuple(results))
    return case


def _call(draw: st.DrawFn, case: Case, written: Written, number: int, spec: ArraySpec, kinds: list[ArraySpec]) -> None:
    devices = spec.sharding.devices
    alike = [v for v in written.usable() if written.specs[v].sharding.devices == devices]  # type: ignore[union-attr]
    inputs = tuple(draw(st.lists(st.sampled_from(alike), min_size=1, max_size=3)))
    # Each shard of an output has other contents, so that replicas would contradict each other.
    possible = [
        k for k in kinds if k.sharding.devices == devices and len({*shard_boxes(k.sharding, SHAPE)}) == len(devices)
    ]
    outputs = tuple(possible[: draw(st.integers(0, 2))])
    donated = draw(st.sampled_from([(), (), (0,)]))
    if [written.memory[v] for v in inputs].count(written.memory[inputs[0]]) > 1:
        donated = ()
    completion = draw(st.booleans())
    name = case.functions.setdefault(number, f"f{number}")
    case.outputs[name] = outputs
    written.add(
        Call(number, inputs, outputs, devices, donated, completion=completion), [*outputs, *[None] * completion]
    )
    written.ended.update(written.memory[inputs[i]] for i in donated)


def _transfer(
    draw: st.DrawFn, written: Written, inputs: tuple[int, ...], targets: list[ArraySpec], reshard: bool
) -> None:
    memory = [written.memory[v] for v in inputs]
    donate = len(set(memory)) == len(memory) and draw(st.integers(0, 4)) == 0
    written.add(Transfer(inputs, tuple(targets), donate, reshard), [*targets])
    if donate:
        written.ended.update(memory)


def evaluate(case: Case) -> list[list[np.ndarray]]:
    """Return the shards of the results, evaluated node by node without lowering."""
    values = [[s.copy() for s in contents(spec, start(i))] for i, spec in enumerate(case.program.arguments)]
    specs: list[ArraySpec | None] = [*case.program.arguments]
    for node in case.program.nodes:
        match node:
            case Call():
                for spec in node.outputs:
                    shards = range(len(node.devices))
                    name = case.functions[node.function]
                    values.append([compute(name, spec, i, [values[v][i] for v in node.inputs]) for i in shards])
            case Transfer(reshard=False):
                values.extend([s.copy() for s in values[v]] for v in node.inputs)
            case Transfer():
                for value, target in zip(node.inputs, node.outputs, strict=True):
                    spec = specs[value]
                    assert spec is not None
                    whole = np.zeros(spec.shape, int)
                    for box, shard in zip(shard_boxes(spec.sharding, spec.shape), values[value], strict=True):
                        whole[slices(box)] = shard
                    values.append([s.copy() for s in contents(target, whole)])
            case Rearrange():
                values.append([values[node.inputs[0]][node.mappings[0].source[0]]])
        specs.extend(node.outputs)
        if isinstance(node, Call) and node.completion:
            values.append([])
            specs.append(None)
    return [values[v] for v in case.program.results]


def start(argument: int) -> np.ndarray:
    return counting(SHAPE) + 100 * argument


def run(case: Case, lowered: Lowered) -> tuple[list[list[np.ndarray]], set[tuple[int, int]]]:
    """Return the shards of the results, and which arguments and results share memory."""
    machine = Machine(case.placement, case.outputs)
    count = len(case.program.arguments)
    given = []
    for i, spec in enumerate(case.program.arguments):
        given.append([s.copy() for s in contents(spec, start(i))])
        machine.load(i, spec, given[-1])
    machine.run(lowered)
    specs: list[ArraySpec | None] = [*case.program.arguments]
    for node in case.program.nodes:
        specs.extend(node.outputs)
        if isinstance(node, Call) and node.completion:
            specs.append(None)
    results = []
    for asked, value in zip(case.program.results, lowered.results, strict=True):
        spec = specs[asked]
        assert spec is not None
        results.append(machine.shards(value, spec))
    everything = [*given, *results]
    shared = {
        (i, j)
        for j in range(count, len(everything))
        for i in range(j)
        if any(np.shares_memory(a, b) for a in everything[i] for b in everything[j])
    }
    return results, shared


def nodes_of(lowered: Lowered) -> int:
    return len({gang.node for gang in lowered.gangs})


@given(cases())
def test_programs_give_what_their_nodes_say_simplified_or_not(case):
    simplified = lower(case.program, case.placement, case.functions)
    plain = finish(cut(finish(place(case.program, case.placement)), case.functions))

    got, shared = run(case, simplified)
    unsimplified, also_shared = run(case, plain)
    for shards, others, wanted in zip(got, unsimplified, evaluate(case), strict=True):
        for a, b, c in zip(shards, others, wanted, strict=True):
            np.testing.assert_array_equal(a, c)
            np.testing.assert_array_equal(b, c)
    assert shared == also_shared, "results are as distinct as before"
    assert simplified.donated == plain.donated
    # Two copies on one island that are joined with their inputs' transfers are two transfers between islands, not
    # gangs.
    assert nodes_of(simplified) <= nodes_of(plain)
    assert simplified.values[: len(case.program.arguments)] == plain.values[: len(case.program.arguments)]
    assert plain.results == case.program.results or any(
        isinstance(node, Transfer) and len(node.inputs) > 1 for node in case.program.nodes
    )


@given(cases())
def test_programs_survive_their_text_before_and_after_simplification(case):
    functions = [f"f{number}" for number in range(10)]
    for program in (case.program, finish(simplify(case.program))):
        assert parse(render(program, functions), functions) == program
