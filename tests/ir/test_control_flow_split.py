"""Tests of splitting programs with control flow nodes into launches."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import StatusError
from atoll.ir.control_flow_split import (
    MAX_CONTROL_FLOW,
    LoopPrograms,
    SplitLaunch,
    SwitchPrograms,
    has_control_flow,
    parts_of,
    split,
)
from atoll.ir.lowering import lower
from atoll.ir.plan import Report as ReportStep
from atoll.ir.program import Call, Loop, Node, Program, Rearrange, Report, Switch, Transfer, check, output_count
from atoll.ir.text import render, render_lowered
from atoll.ir.types import ArraySpec, Sharding
from tests.ir.machine import cluster
from tests.ir.program_text import parse
from tests.thoroughness import examples

SPEC = ArraySpec("int32", (), Sharding((0,)))
MAX_ROUNDS = 5


# ---- the meaning of programs, whose values and conditions are numbers


def call(function: int, inputs: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr((function, inputs)).encode(), digest_size=6).digest())


def run(program: Program, arguments: list[int], reports: list[int] | None = None) -> list[int]:
    check(program)
    values = list(arguments)
    for node in program.nodes:
        inputs = [values[value] for value in node.inputs]
        match node:
            case Call(function=function):
                values.append(call(function, tuple(inputs)))
            case Transfer() | Rearrange():
                values.extend(inputs)
            case Report():
                assert reports is not None
                reports.extend(inputs)
            case Switch(branches=branches):
                values.extend(run(branches[inputs[0] % len(branches)], inputs[1:]))
            case Loop(constants=constants):
                kept, carried = inputs[:constants], inputs[constants:]
                for _ in range(MAX_ROUNDS):
                    (goes_on,) = run(node.condition, kept + carried)
                    if goes_on % 3 == 0:
                        break
                    carried = run(node.body, kept + carried)
                values.extend(carried)
    return [values[value] for value in program.results]


def launch(piece: SplitLaunch, arguments: list[int]) -> list[int]:
    programs = piece.programs
    reports: list[int] = []
    if isinstance(programs, SwitchPrograms):
        run(programs.index, arguments[:1], reports)
        return run(programs.branches[reports[0] % len(programs.branches)], arguments[1:])
    if isinstance(programs, LoopPrograms):
        kept, carried = arguments[: programs.constants], arguments[programs.constants :]
        run(programs.first, arguments, reports)
        for rounds in range(MAX_ROUNDS):
            if reports.pop() % 3 == 0:
                break
            carried = run(programs.following if rounds else programs.begins, kept + carried, reports)
        return run(programs.last, carried)
    return run(programs, arguments)


@st.composite
def straight(draw: st.DrawFn, arguments: int, results: int) -> Program:
    nodes: list[Node] = []
    for _ in range(draw(st.integers(0, 3))):
        value = st.integers(0, arguments + len(nodes) - 1)
        nodes.append(Call(draw(st.integers(0, 9)), tuple(draw(st.lists(value, min_size=1, max_size=2))), (SPEC,), (0,)))
    last = st.integers(0, arguments + len(nodes) - 1)
    given_ = tuple(draw(last) for _ in range(results))
    return Program("part", (SPEC,) * arguments, tuple(nodes), given_)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    nodes: list[Node] = []
    count = arguments = draw(st.integers(1, 3))
    gone: set[int] = set()

    def some() -> int:
        return draw(st.sampled_from([value for value in range(count) if value not in gone]))

    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["call", "call", "transfer", "switch", "loop"]))
        taken = tuple(some() for _ in range(draw(st.integers(1, 3))))
        if kind == "call":
            nodes.append(Call(draw(st.integers(0, 9)), taken, (SPEC,), (0,)))
        elif kind == "transfer":
            donate = draw(st.booleans()) and len(gone) + 1 < count
            nodes.append(Transfer(taken[:1], (SPEC,), donate, reshard=True))
            if donate:
                gone.add(taken[0])
        elif kind == "switch":
            results = draw(st.integers(1, 2))
            branches = tuple(draw(straight(len(taken), results)) for _ in range(draw(st.integers(1, 3))))
            nodes.append(Switch((some(), *taken), (SPEC,) * results, branches))
        else:
            constants = draw(st.integers(0, len(taken) - 1))
            carried = len(taken) - constants
            condition, body = draw(straight(len(taken), 1)), draw(straight(len(taken), carried))
            nodes.append(Loop(taken, (SPEC,) * carried, constants, condition, body))
        count += output_count(nodes[-1])
    made = [value for value in range(arguments, count) if value not in gone]
    results_ = draw(st.lists(st.sampled_from(made), unique=True)) if made else []
    return Program("p", (SPEC,) * arguments, tuple(nodes), tuple(results_))


@settings(max_examples=examples(100))
@given(programs())
def test_the_launches_of_a_program_give_what_its_nodes_say(program: Program) -> None:
    arguments = list(range(len(program.arguments)))
    values = dict(enumerate(arguments))
    consumed: set[int] = set()
    for piece in split(program):
        assert consumed.isdisjoint(piece.arguments), "what reads a value comes before what consumes it"
        for each in parts_of(piece.programs):
            assert not has_control_flow(each)
            assert len(set(each.results)) == len(each.results)
            assert all(value >= len(each.arguments) for value in each.results)
        made = launch(piece, [values[value] for value in piece.arguments])
        values.update(zip(piece.results, made, strict=True))
        if isinstance(piece.programs, Program):
            lowered = lower(piece.programs, cluster(1, 1, 1), {i: f"f{i}" for i in range(10)})
            consumed.update(piece.arguments[i] for i in lowered.donated)
    assert [values[value] for value in program.results] == run(program, arguments)


# ---- dependencies


def choice(*inputs: int) -> Switch:
    branch = Program("b", (SPEC,) * (len(inputs) - 1), (Call(1, (0,), (SPEC,), (0,)),), (len(inputs) - 1,))
    return Switch(inputs, (SPEC,), (branch, branch))


def one(*inputs: int) -> Call:
    return Call(0, inputs, (SPEC,), (0,))


def test_a_launch_waits_for_those_numbers_alone_on_which_it_depends():
    nodes = (one(0), choice(1, 0), choice(1, 0), one(2), one(3), one(2, 3), one(1))
    pieces = split(Program("p", (SPEC,), nodes, (4, 5, 6, 7)))
    assert [(piece.arguments, piece.results) for piece in pieces] == [
        ((0,), (1, 7)),  # all nodes that depend on no number, even if they come last in the program
        ((1, 0), (2,)),
        ((1, 0), (3,)),
        ((2,), (4,)),
        ((3,), (5,)),
        ((2, 3), (6,)),
    ]


def test_a_program_of_too_many_numbers_is_refused():
    nodes = tuple(choice(i, 0) for i in range(MAX_CONTROL_FLOW + 1))
    with pytest.raises(StatusError, match=f"{MAX_CONTROL_FLOW + 1} control flow nodes"):
        split(Program("p", (SPEC,), nodes, ()))


# ---- reports


def test_a_report_is_a_step_of_the_first_host_that_has_the_number():
    spec = ArraySpec("bool", (), Sharding((1, 3)))
    lowered = lower(Program("p", (spec,), (Report((0,)),), ()), cluster(1, 2, 2), {})
    assert {host: plan.segments[0].steps for host, plan in lowered.plans.items()} == {0: (ReportStep(0),)}


@pytest.mark.parametrize(
    "spec", [ArraySpec("float32", (), Sharding((0,))), ArraySpec("int32", (1,), Sharding((0,)))], ids=["float", "array"]
)
def test_only_one_integer_or_boolean_can_be_reported(spec: ArraySpec):
    with pytest.raises(StatusError, match="one integer or boolean"):
        lower(Program("p", (spec,), (Report((0,)),), ()), cluster(1, 1, 1), {})


def test_reports_have_a_text_that_parses():
    program = Program("p", (SPEC,), (Report((0,)),), ())
    text = render(program, [])
    assert "atoll.report %0" in text
    assert parse(text, []) == program


def test_a_node_that_depends_on_data_is_no_part_of_a_launch():
    with pytest.raises(StatusError, match="must be split into launches"):
        lower(Program("p", (SPEC,), (choice(0, 0),), ()), cluster(1, 1, 1), {})


def test_the_text_of_a_program_shows_each_of_its_launches():
    program = Program("p", (SPEC,), (choice(0, 0), one(1)), (2,))
    text = render(program, ["f", "g"])
    assert "// (%1) = run (%0, %0): the first, which reports an index, and then one of the 2 others" in text
    assert "atoll.report %0" in text
    assert "atoll.call @g(%0)" in text
    assert "report %0" in render_lowered(program, cluster(1, 1, 1), ["f", "g"])
