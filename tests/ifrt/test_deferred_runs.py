"""Tests of runs that start when one of their results is used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.errors import OK, Code
from atoll.ifrt.deferred_runs import WINDOW_SHARE
from atoll.protocol import messages as m
from atoll.protocol.submission import Deferring, encode
from tests.ifrt.rig import STACK, Rig, check_refused, on
from tests.protocol.translation.wire import compile_request

SHARD = ("float32", (4,))


def compiled(rig: Rig, inputs: int = 1, donated: tuple[int, ...] = ()) -> tuple[int, int]:
    """Return the handle of an executable on device 0 with two results, and its function's number."""
    op = rig.send("compile", compile_request())
    (asked,) = rig.take()
    output = m.OutputInfo("float32", (4,), None, "device", b"{0}")
    layouts, shards = (b"{0}",) * inputs, (SHARD,) * inputs
    info = m.FunctionInfo("f", b"print", None, layouts, (output,) * 2, donated, {}, 10, shards)
    rig.receive(m.FunctionReady(asked.function, OK, msgspec.msgpack.encode(info)))
    return rig.answer(op).compile.executable, asked.function


def deferred(rig: Rig, fingerprint: bytes) -> Any:
    request = compile_request()
    request.program.type_name = "xla::ifrt::PluginProgram"
    request.program.data = b"__serialized_plugin_program " + encode(Deferring(fingerprint))
    return rig.ask("compile", request)


@pytest.fixture
def later(rig: Rig) -> int:
    """Return the handle of an executable whose runs start later. Array 1 is there as an argument."""
    handle, _ = compiled(rig)
    rig.make(1, on(0))
    return int(deferred(rig, rig.session.executable(handle).fingerprint).compile.executable)


def run(rig: Rig, executable: int, argument: int = 1, results: tuple[int, int] = (5, 6), stack: int = 0) -> Any:
    return rig.ask("execute", executable=executable, arguments=[argument], results=results, stack=stack)


def held(rig: Rig) -> dict[int, bool]:
    rig.receive(m.ReportHandles(1))
    (reported,) = rig.take()
    return dict(reported.handles)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("check_value_ready", {"values": [6]}),
        ("disassemble_into_single_device_arrays", {"array": 6, "results": [9]}),
        ("delete_array", {"arrays": [6]}),
    ],
)
def test_a_run_starts_when_a_result_is_used(rig: Rig, later: int, kind: str, fields: dict[str, Any]) -> None:
    assert run(rig, later).WhichOneof("kind") == "execute"
    assert rig.take() == []
    assert held(rig) == {1: False}, "the controller does not know the results"
    rig.send(kind, **fields)
    _, launch, *_ = rig.take()
    assert (launch.arguments, launch.results) == ((1,), (5, 6))
    assert {5: False, 6: False}.items() <= held(rig).items()
    rig.send("check_value_ready", values=[5])
    assert not [message for message in rig.take() if isinstance(message, m.Launch)], "it starts once"


def test_a_result_is_an_argument_of_other_runs(rig: Rig, later: int) -> None:
    handle, _ = compiled(rig)
    run(rig, later)
    rig.ask("execute", executable=handle, arguments=[6], results=[7, 8])
    launches = [message for message in rig.take() if isinstance(message, m.Launch)]
    assert [(launch.arguments, launch.results) for launch in launches] == [((1,), (5, 6)), ((6,), (7, 8))]


def test_the_argument_is_kept_until_the_run_starts(rig: Rig, later: int) -> None:
    run(rig, later)
    rig.ask("destruct_array", arrays=[1])
    assert rig.take() == []
    assert held(rig) == {1: False}
    rig.send("check_value_ready", values=[5])
    _, launch, released, _ = rig.take()
    assert (launch.arguments, launch.results, released) == ((1,), (5, 6), m.Release((1,)))
    assert held(rig) == {5: False, 6: False}


def test_a_run_whose_results_are_dropped_never_starts(rig: Rig, later: int) -> None:
    run(rig, later)
    rig.ask("destruct_array", arrays=[1, 5])
    assert rig.take() == []
    rig.ask("destruct_array", arrays=[6])
    assert rig.take() == [m.Release((1,))]
    assert held(rig) == {}
    assert rig.session.cluster.window.reserved == 0


def test_the_argument_stays_if_only_the_results_are_dropped(rig: Rig, later: int) -> None:
    run(rig, later)
    rig.ask("destruct_array", arrays=[6, 5])
    assert rig.take() == []
    rig.ask("destruct_array", arrays=[1])
    assert rig.take() == [m.Release((1,))]


def test_results_that_are_dropped_before_the_start_are_released_after_it(rig: Rig, later: int) -> None:
    run(rig, later)
    rig.ask("destruct_array", arrays=[5])
    rig.send("check_value_ready", values=[6])
    _, launch, released, _ = rig.take()
    dropped, kept = launch.results
    assert (kept, released) == (6, m.Release((dropped,)))
    assert dropped != 5, "the client could use the number again"
    check_refused(rig.ask("is_array_deleted", array=5), Code.NOT_FOUND, "unknown array handle 5")


def test_another_use_of_the_argument_starts_the_run(rig: Rig, later: int) -> None:
    run(rig, later)
    run(rig, later, results=(7, 8))
    _, launch = rig.take()
    assert (launch.arguments, launch.results) == ((1,), (5, 6))
    assert rig.session.cluster.window.reserved == 1


def test_a_run_does_not_start_if_its_argument_is_awaited(rig: Rig, later: int) -> None:
    run(rig, later)
    op = rig.send("check_value_ready", values=[1])
    (wait,) = rig.take()
    assert wait.handles == (1,)
    rig.end_waits([wait])
    answer = rig.answer(op)
    assert answer is not None
    assert answer.WhichOneof("kind") == "check_value_ready"
    assert rig.session.arrays.records[1].ready
    assert rig.take() == []


def test_the_runs_of_an_executable_start_before_it_is_unloaded(rig: Rig, later: int) -> None:
    run(rig, later)
    rig.ask("executable_destruct", executable=later)
    registered, launch, released = rig.take()
    assert (launch.results, released) == ((5, 6), m.ReleaseProgram(registered.program))
    assert rig.session.cluster.window.reserved == 0


def test_the_function_is_kept_for_the_runs(rig: Rig) -> None:
    handle, function = compiled(rig)
    later = deferred(rig, rig.session.executable(handle).fingerprint).compile.executable
    rig.ask("executable_destruct", executable=handle)
    assert rig.take() == []
    rig.ask("executable_destruct", executable=later)
    assert rig.take() == [m.ReleaseFunction(function)]


def run_many(rig: Rig, executable: int, count: int, first: int = 0) -> list[tuple[int, ...]]:
    """Run an executable several times. Return the arguments of what was launched."""
    for number in range(first, first + count):
        rig.make(1000 + number, on(0))
        run(rig, executable, 1000 + number, (2000 + number, 3000 + number))
    return [message.arguments for message in rig.take() if isinstance(message, m.Launch)]


def test_the_oldest_run_starts_if_there_are_too_many(rig: Rig, later: int) -> None:
    most = rig.session.cluster.window.size // WINDOW_SHARE
    assert run_many(rig, later, most) == []
    assert run_many(rig, later, 1, most) == [(1000,)]
    assert rig.session.cluster.window.reserved == most


def test_runs_that_have_not_started_take_a_part_of_the_window(rig: Rig, later: int) -> None:
    """A quota of launches limits the window, and one request may start all runs."""
    handle, _ = compiled(rig)
    window = rig.session.cluster.window
    window.size = 8
    run_many(rig, later, 2)
    for result in range(5):
        run(rig, handle, results=(10 + 2 * result, 11 + 2 * result))
    assert (window.in_flight, rig.paused) == (5, False)
    run(rig, handle, results=(30, 31))
    assert (window.in_flight, rig.paused) == (6, True)
    rig.send("check_value_ready", values=[2000, 2001])
    assert (window.in_flight, window.reserved) == (8, 0)
    rig.receive(m.CreditReturned(4))
    assert not rig.paused


def test_a_run_that_has_not_started_may_fill_the_window(rig: Rig, later: int) -> None:
    handle, _ = compiled(rig)
    window = rig.session.cluster.window
    window.size = 4
    for result in range(3):
        run(rig, handle, results=(10 + 2 * result, 11 + 2 * result))
    assert not rig.paused
    run_many(rig, later, 1)
    assert rig.paused
    rig.receive(m.CreditReturned(1))
    assert not rig.paused


def test_a_run_starts_at_once_if_the_window_is_small(rig: Rig, later: int) -> None:
    rig.session.cluster.window.size = 3
    assert run_many(rig, later, 1) == [(1000,)]


def test_the_stack_of_a_run_is_kept_as_long_as_its_results(rig: Rig, later: int) -> None:
    run(rig, later, stack=STACK)
    first = rig.ask("destruct_array", arrays=[5], stack=0)
    rig.send("check_value_ready", values=[6], stack=0)
    (launch,) = [message for message in rig.take() if isinstance(message, m.Launch)]
    assert launch.traceback_id == STACK
    rig.ask("destruct_array", arrays=[6], stack=0)
    rig.make(2, on(0))
    last = rig.ask("is_array_deleted", array=2, stack=0)
    assert [list(each.meta.destroyed_user_context_ids) for each in (first, last)] == [[], [STACK]]


@pytest.mark.parametrize("changes", [{"inputs": 2}, {"donated": (0,)}])
def test_a_function_with_more_arguments_or_a_donated_one_starts_at_once(rig: Rig, changes: dict[str, Any]) -> None:
    handle, _ = compiled(rig, **changes)
    response = deferred(rig, rig.session.executable(handle).fingerprint)
    check_refused(response, Code.INVALID_ARGUMENT, "needs one argument, and donates nothing")


def test_only_functions_of_the_session_can_start_later(rig: Rig) -> None:
    check_refused(deferred(rig, b"stranger"), Code.INVALID_ARGUMENT, "has not compiled")
