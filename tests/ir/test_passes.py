"""Placing and explicit transfers, as text: a program before, and what it is after."""

from __future__ import annotations

import pytest

from atoll.cluster.locations import DeviceLocation, Placement
from atoll.errors import Code, StatusError
from atoll.ir.dialect import context, parse
from atoll.ir.lowering import program_of
from atoll.ir.passes.cut_pass import cut
from atoll.ir.passes.place_pass import PlacePass
from atoll.ir.passes.transfers_pass import ExplicitTransfersPass

# Two islands of one host with two devices each, and one of two hosts with one.
LOCATIONS = [
    DeviceLocation(0, 0, 0),
    DeviceLocation(0, 0, 1),
    DeviceLocation(1, 1, 0),
    DeviceLocation(1, 1, 1),
    DeviceLocation(2, 2, 0),
    DeviceLocation(2, 3, 0),
]
PLACEMENT: Placement = dict(enumerate(LOCATIONS))

A = "int8[4], devices = [0:2], tiled = [2]"
B = "int8[4], devices = [2:4], tiled = [2]"
C = "int8[4], devices = [4:6], tiled = [2]"
WHOLE = "int8[4], devices = [4:6]"
SWAPPED = "int8[4], devices = [1, 0], tiled = [2]"
AT_A = f"!atoll.placed<at = [island 0 hosts 0 each [0:2]], {A}>"
AT_B = f"!atoll.placed<at = [island 1 hosts 1 each [0:2]], {B}>"
AT_C = f"!atoll.placed<at = [island 2 hosts 2:4 each [0]], {C}>"
AT_WHOLE = f"!atoll.placed<at = [island 2 hosts 2:4 each [0]], {WHOLE}>"
AT_SWAPPED = f"!atoll.placed<at = [island 0 hosts 0 each [1, 0]], {SWAPPED}>"


def module(body: str, arguments: str, feeds: str = "") -> str:
    lines = [f"    {line.strip()}" for line in body.strip().splitlines()]
    return "\n".join(
        ["builtin.module {", f"  atoll.program @f({arguments}){feeds} {{", *lines, "  }", "}"],
    )


def test_placing_gives_arrays_calls_and_completions_their_devices():
    before = parse(
        module(
            f"""
            %1, %2 = atoll.call @g(%0) on [4, 5] donate [0] : !atoll.array<{C}>, !atoll.completion
            %3 = atoll.transfer %1 : !atoll.array<{B}>
            %4 = atoll.get %3 feed 0 : !atoll.completion
            atoll.return (%2, %4)
            """,
            f"%0: !atoll.array<{C}>",
            " feeds 1",
        )
    )
    PlacePass(PLACEMENT).apply(context(), before)
    before.verify()
    assert str(before) == module(
        f"""
        %1, %2 = atoll.call @g(%0) at [island 2 hosts 2:4 each [0]] donate [0] : {AT_C}, !atoll.placed_completion<[2:4]>
        %3 = atoll.transfer %1 : {AT_B}
        %4 = atoll.get %3 feed 0 : !atoll.placed_completion<[1]>
        atoll.return (%2, %4)
        """,
        f"%0: {AT_C}",
        " feeds 1",
    )


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("atoll.call @g() on []", Code.INVALID_ARGUMENT, "on no devices"),
        ("atoll.call @g() on [6]", Code.INVALID_ARGUMENT, "'f' names device 6, which this session does not have"),
        ("%1 = atoll.transfer %0 : !atoll.array<int8[4], devices = [0, 7]>", Code.INVALID_ARGUMENT, "device 7"),
        (
            f"%1 = atoll.rearrange %0 [0 at 0:2 -> 0 at 0:2] : !atoll.array<{B}>",
            Code.INVALID_ARGUMENT,
            "cannot move shards to another device",
        ),
        ("%1 = atoll.get %0 feed 0 : !atoll.completion", Code.UNIMPLEMENTED, "shard by shard"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_a_reason(body, code, message):
    text = module(f"{body}\natoll.return ()", f"%0: !atoll.array<{C}>", " feeds 1")
    with pytest.raises(StatusError, match=message) as caught:
        PlacePass(PLACEMENT).apply(context(), parse(text))
    assert caught.value.status.code == code


EXPLICIT = {
    "what stays on its host is moved": (
        f"%1 = atoll.transfer %0 donate : {AT_SWAPPED}",
        f"%1 = atoll.move of 0 %0 donate : {AT_SWAPPED}",
    ),
    "shards that go to another host are sent and received": (
        f"%1 = atoll.transfer %0 : {AT_B}",
        f"""
        atoll.send of 0 %0 feeds 0 to {AT_B}
        %1 = atoll.receive of 0 feeds 0 from {AT_A} : {AT_B}
        """,
    ),
    "each host of several gets its shards": (
        f"%1 = atoll.transfer %0 donate : {AT_C}",
        f"""
        atoll.send of 0 %0 feeds 0 donate to {AT_C}
        %1 = atoll.receive of 0 feeds 0 from {AT_A} : {AT_C}
        """,
    ),
    "a reshard sends the parts that each shard is made of, by a rule": (
        f"%1 = atoll.transfer %0 reshard : {AT_WHOLE}",
        f"""
        atoll.send of 0 %0 feeds 0 reshard to {AT_WHOLE}
        %1 = atoll.receive of 0 feeds 0 reshard from {AT_A} : {AT_WHOLE}
        """,
    ),
    "a reshard whose parts are the same and stay is a move": (
        f"%1 = atoll.transfer %0 reshard : {AT_A}",
        f"%1 = atoll.move of 0 %0 : {AT_A}",
    ),
    "of several arrays some are sent and some moved": (
        f"%1, %2 = atoll.transfer %0, %0 : {AT_B}, {AT_SWAPPED}\n%3 = atoll.transfer %1 : {AT_B}",
        f"""
        atoll.send of 0 %0 feeds 0 to {AT_B}
        %1 = atoll.move of 0 %0 : {AT_SWAPPED}
        %2 = atoll.receive of 0 feeds 0 from {AT_A} : {AT_B}
        %3 = atoll.move of 1 %2 : {AT_B}
        """,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EXPLICIT)
def test_transfers_made_explicit(case):
    before, after = EXPLICIT[case]
    program = parse(module(f"{before}\natoll.return (%1)", f"%0: {AT_A}"))
    ExplicitTransfersPass().apply(context(), program)
    program.verify()
    name = "%2" if case.startswith("of several") else "%1"
    assert str(program) == module(f"{after.strip()}\natoll.return ({name})", f"%0: {AT_A}")


@pytest.mark.parametrize(
    ("stages", "body", "message"),
    [
        ((), "atoll.call @g(%0) on [0:2]", "its calls have no device locations"),
        (
            (PlacePass(PLACEMENT),),
            f"%1 = atoll.transfer %0 : !atoll.array<{B}>",
            "atoll.transfer was not replaced by sends and receives",
        ),
    ],
)
def test_only_what_went_through_the_passes_before_can_be_cut(stages, body, message):
    program = parse(module(f"{body}\natoll.return ()", f"%0: !atoll.array<{A}>"))
    for stage in stages:
        stage.apply(context(), program)
    with pytest.raises(StatusError, match=message):
        cut(program_of(program))
