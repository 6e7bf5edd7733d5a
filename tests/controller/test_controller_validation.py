"""Tests of message validation: each type has a check, and an invalid message only ends its sender's session."""

from __future__ import annotations

import contextlib
import re
import typing
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.controller.validation import NOTHING_TO_VALIDATE, VALIDATORS, validate
from atoll.controller.validation.proxy_validation import PROXIES
from atoll.errors import OK, Status, StatusError
from atoll.ir.program import Call, HostBuffer, HostToDevice, Loop, Mapping, Program, Rearrange, Transfer, single
from atoll.ir.types import ArraySpec, Even, Sharding, Tiled, Uneven
from atoll.ir.validation import MAX_NODES, DefinitionCheck
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import COPY_HANDLES, HOST_FEEDS, LOOP_HANDLES
from tests.controller.play import Play, chain_of, on
from tests.controller.test_others_numbers import frozen
from tests.thoroughness import examples


def test_each_message_has_a_validator_or_nothing_to_validate():
    kinds = set(get_args(m.ToController)) - {m.Hello}
    assert set(VALIDATORS) | NOTHING_TO_VALIDATE == kinds, "see controller/validation"
    assert not set(VALIDATORS) & NOTHING_TO_VALIDATE


def test_each_message_of_a_proxy_is_checked_with_its_session():
    kinds = set(get_args(m.FromProxy))
    assert set(PROXIES) == kinds - NOTHING_TO_VALIDATE


# ---- violations


ON_FIRST = Sharding((0,))


def spec(
    dtype: str = "float32", shape: tuple[int, ...] = (2,), sharding: Sharding = ON_FIRST, **options: Any
) -> ArraySpec:
    return ArraySpec(dtype, shape, sharding, **options)


def calling(output: ArraySpec) -> Program:
    return single("f", (on(0),), Call(1, (0,), (output,), (0,)))


SLICE = 1 << 60
DEFINITIONS = {
    "definition.nodes[0].outputs[0].dtype is 'float33'": calling(spec("float33")),
    "definition.nodes[0].outputs[0].shape is [-1073741824]: a dimension is negative": calling(
        spec(shape=(-(1 << 30),))
    ),
    "definition.nodes[0].outputs[0].shape is [281474976710656, 2]": calling(spec(shape=(1 << 48, 2))),
    "definition.nodes[0].outputs[0].shape has 65 dimensions": calling(spec(shape=(1,) * 65)),
    "names device 9, which this session does not have": calling(on(9)),
    "sharding.devices names a device twice": calling(on(0, 0)),
    "definition.nodes[0].outputs[0].layout is [1]": calling(spec(layout=(1,))),
    "tiling.dims is [3]": calling(spec(sharding=Sharding((0, 1), Tiled((3,), (0, 1))))),
    "tiling.order is not an order of 2 devices": calling(spec(sharding=Sharding((0, 1), Tiled((2,), (0, 2))))),
    "tiling.shard_shape is [-1]": calling(spec(sharding=Sharding((0, 1), Even((-1,))))),
    "tiling has 1 shard for 2 devices": calling(spec(sharding=Sharding((0, 1), Uneven(((1,),))))),
    "definition.nodes[0]: program 'f' uses value 5": single("f", (on(0),), Call(1, (5,), (on(0),), (0,))),
    "definition.nodes[0].devices is empty": single("f", (on(0),), Call(1, (0,), (on(0),), ())),
    "definition.nodes[0].function is -1": single("f", (on(0),), Call(-1, (0,), (on(0),), (0,))),
    "definition.nodes[0].donated names an input twice": single(
        "f", (on(0),), Call(1, (0,), (on(0),), (0,), donated=(0, 0))
    ),
    "definition.nodes[0].buffers[0].shape is [-1]": single(
        "f", (), HostToDevice((HostBuffer(0, (-1,), None, None),), (on(0),)), feeds=1
    ),
    "definition.nodes[0].buffers[0].positions has 7": single(
        "f", (), HostToDevice((HostBuffer(0, (2,), None, (7,)),), (on(0),)), feeds=1
    ),
    "definition.nodes[0].mappings[0] does not fill": single(
        "f", (on(0),), Rearrange((0,), (on(0),), (Mapping(0, 0, (0, 1 << 24, 1), (0, 1 << 24, 1)),))
    ),
    "definition.nodes[0] is a Loop": Program("f", (on(0),), (Loop((0,), (on(0),), 0, chain_of(1), chain_of(1)),), (1,)),
    "definition.nodes[0]: program 'f' transfers 1 input to 2 outputs": Program(
        "f", (on(0),), (Transfer((0,), (on(1), on(1))),), ()
    ),
    "definition.results[0] is 9": Program("f", (on(0),), (), (9,)),
    "definition.feeds is -1": Program("f", (on(0),), (), (), -1),
    "definition.name has 200000 characters": Program("f" * 200_000, (on(0),), (), ()),
}


MESSAGES: dict[str, Any] = {
    "RegisterFunction.function is 1: expected a number that is not in use": m.RegisterFunction(1, "c", 5, ((0,),)),
    "RegisterFunction.function is -1": m.RegisterFunction(-1, "c", 5, ((0,),)),
    "RegisterFunction.content is": m.RegisterFunction(7, "c" * 1000, 5, ((0,),)),
    "RegisterFunction.feed is": m.RegisterFunction(7, "c", HOST_FEEDS.start, ((0,),)),
    "RegisterFunction.assignment is 9: expected devices of this session": m.RegisterFunction(7, "c", 5, ((0, 9),)),
    "RegisterFunction.assignment is ((0, 0),): expected each device once": m.RegisterFunction(7, "c", 5, ((0, 0),)),
    "RegisterFunction.assignment is ((0, 1), (0,))": m.RegisterFunction(7, "c", 5, ((0, 1), (0,))),
    "RegisterFunction.assignment is ()": m.RegisterFunction(7, "c", 5, ()),
    "RegisterProgram.program is 1: expected a number that is not in use": m.RegisterProgram(1, chain_of(1)),
    "RegisterProgram.program is 60: expected a number that is not in use": m.RegisterProgram(60, chain_of(1)),
    "RegisterProgram.program is -1": m.RegisterProgram(-1, chain_of(1)),
    "RegisterSwitch.program is 1: expected a number that is not in use": m.RegisterSwitch(1, 1, (1,)),
    "RegisterSwitch.branches is ()": m.RegisterSwitch(61, 1, ()),
    "RegisterLoop.program is 60: expected a number that is not in use": m.RegisterLoop(60, 0, 1, 1, 1, 1),
    "RegisterLoop.constants is -1": m.RegisterLoop(61, -1, 1, 1, 1, 1),
    "Launch.program is -1": m.Launch(-1, (10,), (11,), ()),
    "Launch.results is 10: expected a handle that is not in use": m.Launch(1, (10,), (10,), ()),
    "Launch.results is 2305843009213693952": m.Launch(1, (10,), (COPY_HANDLES.start,), ()),
    "Launch.results is (12, 12)": m.Launch(1, (10,), (12, 12), ()),
    "Launch.arguments is -1": m.Launch(1, (-1,), (11,), ()),
    "Launch.arguments is 1152921504606846976": m.Launch(1, (SLICE,), (11,), ()),
    "Launch.results is '16385 entries': expected at most 16384": m.Launch(1, (10,), tuple(range(100, 16485)), ()),
    "Launch.arguments is '32769 entries': expected at most 32768": m.Launch(1, (10,) * 32_769, (12,), ()),
    "Launch.released is '1025 entries'": m.Launch(1, (10,), (12,), (), released=(10,) * 1025),
    "Launch.feeds is": m.Launch(1, (10,), (12,), (HOST_FEEDS.start,)),
    "Launch.feeds is (): expected one feed": m.Launch(1, (10,), (12,), (), contents=b""),
    "Launch.feeds is (5, 6): expected one feed": m.Launch(1, (10,), (12,), (5, 6), contents=b""),
    "Launch.contents is '4097 bytes': expected at most 4096": m.Launch(1, (10,), (12,), (5,), contents=bytes(4097)),
    "Launch.released is": m.Launch(1, (10,), (12,), (), released=(LOOP_HANDLES.start,)),
    "Launch.wait is 5: expected a number that is not in use": m.Launch(1, (10,), (12,), (), wait=5),
    "Launch.wait is -1": m.Launch(1, (10,), (12,), (), wait=-1),
    "Launch.credits is": m.Launch(1, (10,), (12,), (), credits=1 << 40),
    "Release.handles is": m.Release((COPY_HANDLES.start,)),
    "Release.handles is '32769 entries'": m.Release(tuple(range(m.MAX_HANDLES + 1))),
    "Await.wait is 5: expected a number that is not in use": m.Await(5, (11,)),
    "Await.wait is -1": m.Await(-1, (10,)),
    "MakeError.handles is 10": m.MakeError((10,), Status(3, "x")),
    "MakeError.status.code is 99": m.MakeError((50,), Status(99, "x")),
    "MakeError.status.code is 0": m.MakeError((50,), OK),
    "MakeError.status.message is": m.MakeError((50,), Status(3, "x" * 100_000)),
    "MakeError.status.payloads is": m.MakeError((50,), Status(3, "x", {str(i): b"" for i in range(100)})),
    "Query.what is 'nothing'": m.Query(5, "nothing", 0, -1, b""),
    "Query.device is 9": m.Query(5, m.QueryKind.MEMORY, 9, -1, b""),
    "Query.function is -2": m.Query(5, m.QueryKind.COST, 0, -2, b""),
    "Query.payload is": m.Query(5, m.QueryKind.MEMORY, 0, -1, b"x" * (2 << 20)),
    "Recompile.feed is -1": m.Recompile(1, -1),
    "FailureAcknowledged.hosts is '1000 entries'": m.FailureAcknowledged((0,) * 1000),
    "FailureAcknowledged.resent is '5000 entries'": m.FailureAcknowledged((0,), ((0, 1),) * 5000),
    "FailureAcknowledged.resent is (9, 1)": m.FailureAcknowledged((0,), ((9, 1),)),
    "FailureAcknowledged.unsent is -1": m.FailureAcknowledged((0,), (), (-1,)),
    "AddSlice.request is -1": m.AddSlice(-1, m.SliceRequest(1)),
    "ReleaseSlice.slice is -1": m.ReleaseSlice(-1),
    "Quiesced.migration is -1": m.Quiesced(-1),
    "Pong.seconds is nan": m.Pong(float("nan")),
    "Pong.clock is -2": m.Pong(0.0, -2),
    "CallsRecorded.seconds is inf": m.CallsRecorded(1, float("inf"), 0, b""),
    "HandlesReported.check is -1": m.HandlesReported(-1, None),
    "ReleaseFunction.function is -1": m.ReleaseFunction(-1),
    "ReleaseProgram.program is -1": m.ReleaseProgram(-1),
    **{f"RegisterProgram.{path}": m.RegisterProgram(70, each) for path, each in DEFINITIONS.items() if path[0] == "d"},
}


class Busy(Play):
    """Session with a function, a program, a switch, an array, and a wait for a running launch."""

    def __init__(self) -> None:
        super().__init__("1x1x2")
        self.with_call()
        self.array(10)
        self.send(m.Launch(1, (10,), (11,), ()))
        self.send(m.RegisterSwitch(60, 1, (1,)))
        self.send(m.Await(5, (11,)))

    def state(self) -> Any:
        return frozen(
            (self.controller.sessions[self.session], self.controller.functions, self.controller.programs.plans)
        )


@pytest.mark.parametrize("text", MESSAGES)
def test_a_violation_ends_the_session_with_its_field_and_changes_nothing(text):
    play = Busy()
    session = play.controller.sessions[play.session]
    before = play.state()
    with pytest.raises(StatusError, match=re.escape(text)):
        PROXIES[type(MESSAGES[text])](session, MESSAGES[text], play.topology)
    assert play.state() == before
    closing, *_ = play.send(MESSAGES[text])
    assert isinstance(closing, m.Closing)
    assert text in closing.status.message
    assert play.session not in play.controller.sessions
    assert play.controller.functions.users == {}, "its program and its function were dropped"
    assert play.controller.programs.plans == {}


@pytest.mark.parametrize("text", DEFINITIONS)
def test_a_definition_that_cannot_be_ends_the_session_with_the_path_of_its_field(text):
    play = Busy()
    closing, *_ = play.send(m.RegisterProgram(70, DEFINITIONS[text]))
    assert isinstance(closing, m.Closing)
    assert text in closing.status.message
    assert play.session not in play.controller.sessions


def test_more_nodes_than_a_program_may_have_are_refused():
    check = DefinitionCheck("f", 0, {0})
    check.arguments((on(0),))
    node = Call(1, (0,), (), (0,))
    for _ in range(MAX_NODES):
        check.node(node)
    with pytest.raises(StatusError, match=f"nodes has more than {MAX_NODES} entries"):
        check.node(node)


def test_a_program_that_is_registered_twice_leaves_no_plan_behind():
    play = Play()
    play.with_call()
    plans = dict(play.controller.programs.plans)
    sent = play.send(m.RegisterProgram(1, single("f", (on(0),), Call(1, (0,), (on(0),), (0,)))))
    dropped = [each.plan for each in sent if isinstance(each, m.DropPlan)]
    assert dropped == list(plans)
    assert play.controller.programs.plans == {}


# ---- random messages with correct types


INTEGERS = st.one_of(st.integers(-4, 12), st.sampled_from((1 << 60, 1 << 61, 1 << 62, (1 << 63) - 1, -(1 << 63))))


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a field's type, mostly small numbers that may be in use."""
    if kind is int:
        return INTEGERS
    if kind is float:
        return st.floats()
    if kind is str:
        return st.text(max_size=4)
    if kind is bytes:
        return st.binary(max_size=20)
    if typing.get_origin(kind) is tuple and typing.get_args(kind)[-1] is Ellipsis:
        return st.lists(values_of(typing.get_args(kind)[0]), max_size=3).map(tuple)
    if typing.get_origin(kind) is tuple:
        return st.tuples(*map(values_of, typing.get_args(kind)))
    if typing.get_origin(kind) is dict:
        key, value = map(values_of, typing.get_args(kind))
        return st.dictionaries(key, value, max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    if typing.get_origin(kind) is typing.Annotated:
        return values_of(typing.get_args(kind)[0])
    if typing.get_args(kind):
        return st.one_of(*map(values_of, typing.get_args(kind)))
    return st.from_type(kind)


def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {field.name: values_of(hints[field.name]) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields).filter(_is_message_content)


def _is_message_content(value: Any) -> bool:
    """Return whether the decoder accepts the value, because some fields have limits of their own."""
    try:
        return bool(msgspec.convert(msgspec.to_builtins(value), type(value)) == value)
    except (msgspec.ValidationError, OverflowError):
        return False


FROM_PROXIES = sorted(get_args(m.FromProxy), key=lambda each: each.__name__)
# Programs are recursive.
PLAIN = [each for each in FROM_PROXIES if each not in (m.RegisterProgram, m.ProgramPart)]
NODES = st.one_of(structs(Call), structs(HostToDevice), structs(Transfer), structs(Rearrange))
PROGRAMS = st.builds(
    Program,
    st.text(max_size=3),
    st.lists(structs(ArraySpec), max_size=2).map(tuple),
    st.lists(NODES, max_size=2).map(tuple),
    st.lists(INTEGERS, max_size=2).map(tuple),
    st.integers(-1, 2),
)
ANY = st.one_of(
    *map(structs, PLAIN), st.builds(m.RegisterProgram, INTEGERS, PROGRAMS), st.builds(m.ProgramPart, INTEGERS, PROGRAMS)
)


@settings(max_examples=examples(60), deadline=None)
@given(messages=st.lists(ANY, min_size=1, max_size=6))
def test_whatever_a_proxy_sends_is_handled_or_ends_its_session(messages):
    play = Busy()
    for message in messages:
        session = play.controller.sessions.get(play.session)
        if session is None:
            break
        before = play.state()
        try:
            validator = PROXIES.get(type(message))
            if validator is not None:
                validator(session, message, play.topology)
        except StatusError:
            assert play.state() == before
            play.send(message)
            assert play.session not in play.controller.sessions
        else:
            play.send(message)


OTHERS = sorted(set(get_args(m.ToController)) - {m.Hello, *FROM_PROXIES} | {m.Pong}, key=lambda each: each.__name__)


@settings(max_examples=examples(100), deadline=None)
@given(message=st.one_of(*map(structs, OTHERS)))
def test_a_message_of_the_clusters_own_is_valid_or_a_violation(message):
    with contextlib.suppress(StatusError):
        validate(message, Play().topology)
