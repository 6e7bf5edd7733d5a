"""Tests of valid and invalid submissions of programs with control flow nodes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.errors import Code
from atoll.ir.program import Call, Loop, Program, Report, Route, Switch, Transfer, Unroute
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.protocol import submission
from tests.ifrt.requests.test_executable_requests import OUTPUT, compiled
from tests.ifrt.rig import Rig, check_refused
from tests.protocol.translation.wire import compile_request

NUMBER = ArraySpec("int32", (), Sharding((0,)))
FLAG = ArraySpec("bool", (), Sharding((0,)))
FAR = msgspec.structs.replace(OUTPUT, sharding=Sharding((3,), memory_kind="device"))
CALL = Call(0, (0,), (OUTPUT,), (0,))
NEAR = Program("near", (OUTPUT,), (CALL,), (1,))
SAME = Program("same", (OUTPUT,), (), (0,))
THERE = Program("there", (OUTPUT,), (Transfer((0,), (FAR,), reshard=True),), (1,))
SWITCH = Switch((0, 1), (OUTPUT,), (NEAR, SAME))
KNOWN = Program("known", (FLAG, OUTPUT), (), (0,))
BODY = Program("body", (FLAG, OUTPUT), (Call(0, (1,), (OUTPUT,), (0,)),), (2,))


def submitted(rig: Rig, program: Program) -> Any:
    handle, _ = compiled(rig)
    fingerprint = rig.session.executable(handle).fingerprint
    request = compile_request()
    request.program.type_name = "xla::ifrt::PluginProgram"
    data = submission.encode(submission.Submission(program, (fingerprint,)))
    request.program.data = b"__serialized_plugin_program " + data
    return rig.ask("compile", request)


def chooses(node: Switch | Loop, number: ArraySpec = NUMBER) -> Program:
    return Program("p", (number, OUTPUT), (node,), (2,))


def test_a_switch_is_its_programs_and_one_launch_of_them(rig: Rig):
    reply = submitted(rig, chooses(SWITCH)).compile
    rig.make(1, NUMBER)
    rig.make(2, OUTPUT)
    rig.ask("execute", executable=reply.executable, arguments=[1, 2], results=[5])
    *registered, switch, launch = rig.take()
    assert [each.definition.name for each in registered] == ["p (index)", "near", "same"]
    assert switch == m.RegisterSwitch(switch.program, *_numbers(registered))
    assert (launch.program, launch.arguments, launch.results) == (switch.program, (1, 2), (5,))
    rig.ask("executable_destruct", executable=reply.executable)
    released = [each.program for each in rig.take() if isinstance(each, m.ReleaseProgram)]
    assert released == [*(each.program for each in registered), switch.program]


def _numbers(registered: list[Any]) -> tuple[int, tuple[int, ...]]:
    index, *branches = (each.program for each in registered)
    return index, tuple(branches)


def test_a_loop_is_its_programs_and_what_is_around_it_launches_of_their_own(rig: Rig):
    loop = Loop((0, 1), (OUTPUT,), 1, KNOWN, BODY)
    program = Program("p", (FLAG, OUTPUT), (loop, Transfer((2,), (FAR,), reshard=True)), (3,))
    reply = submitted(rig, program).compile
    rig.make(1, FLAG)
    rig.make(2, OUTPUT)
    rig.ask("execute", executable=reply.executable, arguments=[1, 2], results=[5])
    first, following, last, loop_message, after, launch, second, release = rig.take()
    around = following.program  # also the first time, since it consumes nothing
    assert loop_message == m.RegisterLoop(loop_message.program, 1, first.program, around, around, last.program)
    assert [type(node) for node in following.definition.nodes] == [Call, Report]
    assert (launch.program, second.program) == (loop_message.program, after.program)
    assert (second.arguments, second.results) == (launch.results, (5,))
    assert release == m.Release(launch.results)


replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (chooses(replace(SWITCH, branches=())), "without branches"),
        (chooses(replace(SWITCH, inputs=(), branches=(NEAR,))), "without an index"),
        (chooses(replace(SWITCH, inputs=(1, 1))), "one integer or boolean, not by float32"),
        (chooses(replace(SWITCH, inputs=(0, 0))), "'near' takes ['float32[4] on devices [0]'], got"),
        (chooses(replace(SWITCH, inputs=(0,))), "'near' takes ['float32[4] on devices [0]'], got"),
        (
            chooses(replace(SWITCH, branches=(NEAR, THERE))),
            "on devices [0]'] and ['float32[4] on devices [3]']",
        ),
        (chooses(replace(SWITCH, branches=(NEAR, replace(NEAR, results=())))), "return different types"),
        (
            replace(chooses(replace(SWITCH, outputs=())), results=()),
            "expects 0 results from control flow, which returns 1",
        ),
        (chooses(replace(SWITCH, outputs=(FAR,))), "expects float32[4] on devices [3] from control flow"),
        (chooses(replace(SWITCH, branches=(NEAR, chooses(SWITCH)))), "'p' takes"),
        (chooses(replace(SWITCH, branches=(replace(NEAR, nodes=(SWITCH,)),))), "'near' uses value 1"),
        (
            Program("p", (NUMBER, OUTPUT), (Switch((0, 0, 1), (OUTPUT,), (chooses(SWITCH),)),), (2,)),
            "a Switch is not allowed in a part of a control flow node",
        ),
        (
            chooses(replace(SWITCH, branches=(replace(THERE, nodes=(Transfer((0,), (FAR,), True, True),)),))),
            "'there' is part of control flow, so it cannot consume its arguments",
        ),
        (chooses(replace(SWITCH, branches=(replace(NEAR, nodes=(replace(CALL, function=1),)),))), "function 1 of 1"),
        (chooses(replace(SWITCH, branches=(replace(NEAR, feeds=1),))), "cannot have feeds"),
        (chooses(Loop((0, 1), (OUTPUT,), 3, KNOWN, BODY), FLAG), "a loop with 3 constants"),
        (chooses(Loop((0, 1), (OUTPUT,), -1, KNOWN, BODY), FLAG), "a loop with -1 constants"),
        (chooses(Loop((0, 1), (OUTPUT,), 1, replace(KNOWN, results=(0, 0)), BODY), FLAG), "has 2 results, not one"),
        (chooses(Loop((0, 1), (OUTPUT,), 1, replace(KNOWN, results=(1,)), BODY), FLAG), "one integer or boolean"),
        (chooses(Loop((0, 1), (OUTPUT,), 0, KNOWN, BODY), FLAG), "return different types"),
        (chooses(Loop((0, 1), (OUTPUT,), 1, KNOWN, replace(BODY, results=())), FLAG), "return different types"),
        (Program("p", (NUMBER,), (Report((0,)),), ()), "a Report is not allowed in a client's program"),
        (Program("p", (OUTPUT, NUMBER), (Route((0, 1), (FAR, NUMBER), 1),), (2,)), "expected sizes, spans or an order"),
        (Program("p", (OUTPUT,), (Unroute((0, 0), (replace(FAR, dtype="string"),), 1),), (1,)), "invalid dtype"),
        (chooses(replace(SWITCH, branches=(replace(SAME, nodes=(Report((0,)),)),))), "a Report is not allowed"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(rig: Rig, program: Program, text: str):
    check_refused(submitted(rig, program), Code.INVALID_ARGUMENT, text)
