"""Tests of isolation: a session that sends the numbers of another session's objects does not reach these objects.

The tests generate messages from the types of all messages that proxies send. Fields for handles, programs, functions,
feeds and slices have the numbers of the other session.
"""

from __future__ import annotations

import dataclasses
import random
import typing
from collections import deque
from enum import Enum
from typing import Any, get_args

import msgspec
import pytest

from atoll.cluster.slice_requests import SliceRequest
from atoll.ir.program import Call, Program, Report, single
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from tests.controller.dumps import check_dump
from tests.controller.play import on
from tests.controller.test_tenants import ALICE
from tests.launch.test_control_flow_runs import BRANCHES, INDEX, LOOP, NUMBER, SWITCH, Chooser
from tests.protocol.test_messages import SAMPLES, STATUS
from tests.thoroughness import examples, longer

HELD, RUNNING, WAITING, ERROR, FRESH = 10, 20, 21, 22, 500  # arrays; FRESH does not exist yet
EARLY, AWAITED, SOURCE = 700, 701, 903
# The numbers of the other session's objects, by the field that contains them. Other fields get any of these numbers.
NUMBERS: dict[str, tuple[int, ...]] = {
    "handles": (HELD, RUNNING, WAITING, ERROR, FRESH),
    "arguments": (HELD, 11),
    "results": (HELD, RUNNING, WAITING, FRESH),
    "program": (2, 3, BRANCHES[0], SWITCH, LOOP),
    "function": (1, 2, 3),
    "feed": (EARLY, AWAITED, SOURCE),
    "feeds": (EARLY, AWAITED),
    "slice": (1, 2, 3),
    "hosts": (0, 1),
    "migration": (1, 2, 3),
    "check": (1,),
    "request": (1, 2, 5),
    "device": (0, 1, 2, 3),
    "assignment": (0, 1, 2, 3),
    "credits": (1,),
}
ALL = sorted({number for some in NUMBERS.values() for number in some} | {INDEX, *BRANCHES, 5, 6, 7})
DEFINITIONS = (
    single("f", (on(0),), Call(1, (0,), (on(0),), (0,))),
    single("g", (on(1),), Call(2, (0,), (on(1),), (1,), donated=(0,))),
    Program("index", (NUMBER,), (Report((0,)),), ()),
)


class Owner(Chooser):
    """Session with one object of each kind, and a wait for each of them.

    Each instance starts with the same events. The test with random messages dumps the controller at its end.
    """

    def __init__(self) -> None:
        super().__init__("2x1x2", token="cluster", dumps=False, tenants=(ALICE,))
        self.owner = self.session
        say = self.send
        self.array(13)
        say(m.Publish(8, "own", 1, (13,), ("w",)))
        say(m.OpenVersion(9, "own"))  # reader 1
        self.reporter = self.switch(RUNNING)  # its result has a dependency
        say(m.Launch(3, (RUNNING,), (WAITING,), ()))
        say(m.MakeError((ERROR,), STATUS))
        self.report(0, m.FeedsArrived(self.owner, (EARLY,)))
        say(m.Launch(2, (), (23,), (AWAITED,)))
        say(m.RegisterFunction(3, "content 3", SOURCE, ((0,),)))
        say(m.AddSlice(5, SliceRequest(1)))
        say(m.Await(6, (RUNNING, WAITING)))
        say(m.Query(7, m.QueryKind.MEMORY, 0, 1, b""))
        say(m.OpenVersion(10, "own", newer_than=7, seconds=30.0))
        say(m.Publish(14, "own", 1, (WAITING,), ("w",)))
        self.lose(1, "it burnt")  # messages to it fail until the proxy knows of the loss
        self.operator(m.CheckRequest())
        self.operator(m.RecordRequest(60.0))
        self.operator(m.TraceRequest(recording=1))
        self.operator(m.SuspendRequest(self.owner))
        self.flush()

    def state(self) -> Any:
        """Return the controller's state of the session, and all requests of others that the session must answer."""
        controller = self.controller
        return frozen(
            (
                controller.sessions[self.owner],
                [each for each in controller._queries._asked.items() if each[1][1] == self.owner],
                [each for each in controller._compilation._awaiting.items() if each[0][0] == self.owner],
                controller._checks._checks,
                controller._tracing._answers,
                controller.suspensions.by_session,
                controller.migrations.under_way,
                *self.published(),
            )
        )

    def published(self) -> list[Any]:
        """Return the versions that the session has published, and its readers and requests."""
        names = self.controller.published.names
        return [
            [(each.number, each.state, each.handles, each.held) for each in names.versions()],
            [reader for reader, (session, _) in names.readers.items() if session == self.owner],
            [key for key in names.waits if key[0] == self.owner],
        ]


def frozen(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return a comparable copy of a value. It omits tenants and measurements."""
    seen = {} if seen is None else seen
    if isinstance(value, int | float | str | bytes | Enum | None):
        return value
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [(frozen(key, seen), frozen(each, seen)) for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple | deque):
        return [frozen(each, seen) for each in value]
    name = type(value).__name__
    if name in ("Tenant", "Account", "DurationEstimate", "GangSpec", "RegisteredProgram"):
        return name
    if isinstance(value, msgspec.Struct):
        return name, [frozen(getattr(value, each), seen) for each in value.__struct_fields__]
    if dataclasses.is_dataclass(value):
        return name, [frozen(getattr(value, each.name), seen) for each in dataclasses.fields(value)]
    return name


def naming(kind: type[Any], rng: random.Random) -> Any:
    """Return a random message of this type that contains numbers of the owner."""
    hints = typing.get_type_hints(kind)
    values = {name: value(hints[name], NUMBERS.get(name, ALL), rng) for name in kind.__struct_fields__}
    return kind(**values | ({"name": "own"} if "name" in values else {}))


def value(hint: Any, numbers: typing.Sequence[int], rng: random.Random) -> Any:
    arguments = get_args(hint)
    if hint is int:
        return rng.choice(numbers)
    if hint is bool:
        return rng.random() < 0.5
    if hint is Program:
        return rng.choice(DEFINITIONS)
    if hint is SliceRequest:
        return SliceRequest(rng.choice((1, 2)), exclusive=rng.random() < 0.5)
    if hint == dict[int, bool] | None:
        return {rng.choice(numbers): False}
    if typing.get_origin(hint) is tuple and arguments[-1] is Ellipsis:
        return tuple(value(arguments[0], numbers, rng) for _ in range(rng.choice((1, 1, 2))))
    if typing.get_origin(hint) is tuple:
        return tuple(value(each, numbers, rng) for each in arguments)
    return SAMPLES[hint]


def names_numbers(kind: type[Any]) -> bool:
    return any("int" in str(hint) for hint in typing.get_type_hints(kind).values()) and kind is not m.Pong


KINDS = [kind for kind in get_args(m.FromProxy) if names_numbers(kind)]


@longer
@pytest.mark.parametrize("token", ["alice", "cluster"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_session_says_about_anothers_numbers_reaches_nothing_of_it(kind, token):
    play, rng = Owner(), random.Random(0)
    before = play.state()
    for _ in range(examples(50, part=6)):
        other = play.open(token=token).number
        play.flush()
        for _ in range(3):
            play.proxy(other, naming(kind, rng))  # ends some of these sessions
        play.close(other)
        for action in play.flush():
            assert isinstance(action, a.Send | a.Close | a.Name | a.Log), action
            if isinstance(action, a.Log):
                assert action.session == other
                continue
            assert play.name_of(action.connection) != ("session", play.owner)
            if isinstance(action, a.Send) and play.name_of(action.connection)[0] == "host":
                assert getattr(action.message, "session", other) == other
        assert play.state() == before
    # The owner's work continues.
    chosen, waiting = [each for each in play.number(play.reporter, 0) if isinstance(each, m.Run)]
    assert (chosen.results, waiting.results) == ((RUNNING,), (WAITING,))
    check_dump(play.controller)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_said_by_whose_numbers_they_are_does_something(kind):
    """Check that the test above would notice an effect."""
    rng = random.Random(0)
    for _ in range(100):
        play = Owner()
        before = play.state()
        play.proxy(play.owner, naming(kind, rng))
        play.flush()  # expensive messages wait in the inbox
        if play.owner not in play.controller.sessions or play.state() != before:
            break
    else:
        raise AssertionError("it changes nothing")
