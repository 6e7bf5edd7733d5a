"""Tests of the order of an MPMD program's nodes: its guarantees, and the waits that it causes on hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import StatusError
from atoll.executables.mpmd_order import ordered
from atoll.ir.program import Call, Node, Program, Transfer, check, consumes
from atoll.ir.types import ArraySpec, Sharding
from atoll.pipelines.entries import Kind
from atoll.pipelines.schedules import schedule
from tests.thoroughness import examples


def on(*devices: int) -> ArraySpec:
    return ArraySpec("float32", (), Sharding(devices))


def device_of(spec: ArraySpec) -> int:
    return spec.sharding.devices[0]


def call(function: int, inputs: Sequence[int], device: int, donated: tuple[int, ...] = (), outputs: int = 1) -> Call:
    return Call(function, tuple(inputs), (on(device),) * outputs, (device,), donated)


def copy(values: Sequence[int], device: int) -> Transfer:
    return Transfer(tuple(values), (on(device),) * len(values), reshard=True)


def host_of(device: int) -> int:
    return device


@dataclass
class Hosts:
    """Model of hosts with one device each that run the nodes of a program in order. Calls take `durations[function]`.

    A host waits for the values that it receives, and enqueues at most two calls before its device has ended the first.
    Copies take `latency`. `ends` has the end of the last call of each host.
    """

    durations: Sequence[float]
    latency: float = 0.01
    ends: dict[int, float] = field(default_factory=dict)

    def run(self, program: Program) -> float:
        """Return the time at which all calls have ended."""
        device = {number: device_of(spec) for number, spec in enumerate(program.arguments)}
        ready = dict.fromkeys(device, 0.0)
        reached: dict[int, float] = {}  # when a host has enqueued all earlier nodes
        started: dict[int, list[float]] = {}  # ends of calls, by host
        for node in program.nodes:
            made = range(len(device), len(device) + len(node.outputs))
            device.update(zip(made, map(device_of, node.outputs), strict=True))
            if isinstance(node, Call):
                host, ended = node.devices[0], started.setdefault(node.devices[0], [0.0, 0.0])
                reached[host] = max(reached.get(host, 0.0), ended[-2])
                start = max([reached[host], ended[-1], *(ready[value] for value in node.inputs)])
                ended.append(start + self.durations[node.function])
                ready.update(dict.fromkeys(made, ended[-1]))
            else:
                source, target = device[node.inputs[0]], device[made[0]]
                sent = max([reached.get(source, 0.0), *(ready[value] for value in node.inputs)])
                reached[target] = max(reached.get(target, 0.0), sent + self.latency)
                ready.update(dict.fromkeys(made, reached[target]))
        self.ends = {host: ended[-1] for host, ended in started.items()}
        return max(self.ends.values())


def meaning(program: Program) -> list[Any]:
    """Return the results as expressions. Fail if a node uses a value that an earlier one has consumed."""
    check(program)
    values: list[Any] = [("argument", i) for i in range(len(program.arguments))]
    consumed: set[int] = set()
    for node in program.nodes:
        assert consumed.isdisjoint(node.inputs)
        consumed.update(consumes(node))
        inputs = tuple(values[value] for value in node.inputs)
        if isinstance(node, Call):
            values += [(node.function, inputs, i) for i in range(len(node.outputs))]
        else:
            values += [("copy", each, device_of(spec)) for each, spec in zip(inputs, node.outputs, strict=True)]
    return [values[value] for value in program.results]


def calls_of(program: Program, host: int) -> list[int]:
    return [node.function for node in program.nodes if isinstance(node, Call) and node.devices == (host,)]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Generate programs on three hosts with distinct functions, which may consume values that nothing uses later."""
    hosts = 3
    specs = [on(draw(st.integers(0, hosts - 1))) for _ in range(draw(st.integers(1, 4)))]
    arguments, nodes = tuple(specs), list[Node]()
    alive = set(range(len(specs)))
    for number in range(draw(st.integers(1, 25))):
        if not alive:
            break
        host = draw(st.integers(0, hosts - 1))
        node: Node
        if draw(st.booleans()):
            chosen = draw(st.lists(st.sampled_from(sorted(alive)), min_size=1, max_size=3))
            node = copy(chosen, host)
        else:
            here = [value for value in sorted(alive) if device_of(specs[value]) == host]
            chosen = draw(st.lists(st.sampled_from(here), max_size=3, unique=True)) if here else []
            donated = tuple(i for i in range(len(chosen)) if draw(st.booleans()))
            node = call(number, chosen, host, donated, draw(st.integers(1, 2)))
        alive -= set(consumes(node))
        alive |= set(range(len(specs), len(specs) + len(node.outputs)))
        specs += node.outputs
        nodes.append(node)
    made = [value for value in sorted(alive) if value >= len(arguments)]
    results = tuple(draw(st.lists(st.sampled_from(made), unique=True))) if made else ()
    return Program("any", arguments, tuple(nodes), results)


@settings(max_examples=examples(100))
@given(programs())
def test_results_and_the_order_of_calls_of_a_mesh_stay(program: Program) -> None:
    found = ordered(program, host_of)
    assert meaning(found) == meaning(program)
    assert [calls_of(found, host) for host in range(3)] == [calls_of(program, host) for host in range(3)]


def as_clients_list_it(name: str, stages: int, microbatches: int) -> tuple[Program, list[float]]:
    """Return a step under a schedule, and the durations of its functions: 1 forward, 2 backward.

    As in Shardy's programs, a call is listed when its inputs exist, starting with the last stage, and its results are
    copied at once.
    """
    table, functions = schedule(name, stages, microbatches), count()
    rows = [list(row) for row in table.rows]
    specs, nodes, durations = [on(stage) for stage in range(stages)], list[Node](), list[float]()
    values: dict[tuple[int, int, bool], int] = {}  # the inputs of a stage: micro-batch, and whether it is a gradient
    kept: dict[tuple[int, int], int] = {}

    def add(node: Node) -> range:
        nodes.append(node)
        specs.extend(node.outputs)
        return range(len(specs) - len(node.outputs), len(specs))

    while any(rows):
        for stage in reversed(range(stages)):
            if not rows[stage]:
                continue
            entry = rows[stage][0]
            backward, microbatch = entry.kind is Kind.BACKWARD, entry.microbatch
            edge = stages - 1 if backward else 0
            if stage != edge and (stage, microbatch, backward) not in values:
                continue
            rows[stage].pop(0)
            inputs = [kept[stage, microbatch] if backward else stage]
            inputs += [values[stage, microbatch, backward]] if stage != edge else []
            durations.append(2.0 if backward else 1.0)
            made = add(call(next(functions), inputs, stage, outputs=2))
            kept[stage, microbatch] = made[0]
            after = stage - 1 if backward else stage + 1
            if 0 <= after < stages:
                values[after, microbatch, backward] = add(copy((made[1],), after))[0]
            break
    return Program(name, tuple(specs[:stages]), tuple(nodes), (len(specs) - 1,)), durations


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_step_takes_as_long_as_its_schedule(name: str) -> None:
    stages, microbatches = 4, 16
    program, durations = as_clients_list_it(name, stages, microbatches)
    hosts = Hosts(durations)
    ideal = 3.0 * (microbatches + stages - 1)
    assert hosts.run(ordered(program, host_of)) < ideal + 1
    if name == "1f1b":
        assert hosts.run(program) > 1.1 * ideal


def test_a_copy_of_values_of_several_calls_sends_each_when_it_is_made() -> None:
    program = Program(
        "p",
        (on(0), on(1)),
        (call(0, [0], 0), call(1, [2], 0), copy([2, 3], 1), call(2, [4], 1), call(3, [5, 6], 1)),
        (7,),
    )
    durations = [1.0, 1.0, 1.0, 1.0]
    assert Hosts(durations).run(program) == pytest.approx(4.01)
    assert Hosts(durations).run(ordered(program, host_of)) == pytest.approx(3.01)


def test_meshes_that_share_a_host_keep_the_order_of_their_calls() -> None:
    nodes = (call(0, [0], 0), call(1, [1], 1), call(2, [0], 0), call(3, [1], 1))
    program = Program("p", (on(0), on(1)), nodes, (2, 3, 4, 5))
    assert [node.function for node in ordered(program, lambda device: 0).nodes if isinstance(node, Call)] == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    "program",
    [
        Program("p", (on(0),), (call(0, [1], 0),), (1,)),
        Program("p", (on(0),), (call(0, [0], 0),), (2,)),
        Program("p", (on(0),), (Call(0, (0,), (on(0),), ()),), (1,)),
    ],
)
def test_an_invalid_program_is_refused(program: Program) -> None:
    with pytest.raises(StatusError, match="INVALID_ARGUMENT"):
        ordered(program, host_of)
