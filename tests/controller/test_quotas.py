"""Tests of quotas: the error names the quota and the holders of the resource, and other tenants are not affected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.slice_requests import SliceRequest
from atoll.controller.controller_dumps import load_controller
from atoll.errors import OK, Code, Status
from atoll.ir.program import Call, HostBuffer, HostToDevice, Mapping, Program, Rearrange, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.launch.memory_waits import _amounts
from atoll.launch.uncompiled_programs import MAX_UNCOMPILED
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from atoll.state.compiled_functions import output_sizes
from tests.controller.dumps import dumped
from tests.controller.play import Play, on, runs
from tests.controller.test_tenants import shared
from tests.telemetry.reports import snapshot_of

MIB = 1 << 20


def playing(topology: str = "1x1x2", **settings: Any) -> Play:
    """Return a play whose session belongs to bob, with these settings."""
    play = shared(topology, **settings)
    play.session = play.open(token="bob").number
    play.outbox()
    return play


def awaited(play: Play, handle: int) -> Status:
    """Return the final status of an array, with no other session left to wait for."""
    replies = play.send(m.Await(5, (handle,)))
    for now in (100.0, 101.0, 102.0):
        play.tick(now)
    (answer,) = [message for message in [*replies, *play.outbox()] if isinstance(message, m.Awaited)]
    status: Status = answer.status
    return status


def refusals(play: Play, tenant: str = "bob") -> dict[str, int]:
    """Return the number of refused requests of a tenant by quota, as the report has them."""
    (found,) = [each.refusals for each in snapshot_of(play).tenants if each.name == tenant]
    return dict(found)


def closings(play: Play) -> list[tuple[tuple[str, int], Status]]:
    """Return the sessions that were ended since the last call, with the reasons."""
    return [(to, message.status) for to, message in play.sent() if isinstance(message, m.Closing)]


# ---- sessions, slices, launches


def test_a_tenant_has_no_more_sessions_than_its_quota():
    play = shared(sessions=1)
    bob = play.open(token="bob")
    play.connect("proxy", token="bob")
    (refused, *_) = [each.message for each in play.flush() if isinstance(each, a.Send) and
                     isinstance(each.message, m.Refused)]  # fmt: skip
    assert "tenant bob has reached its quota `sessions` of 1" in refused.status.message
    event = play.controller.history.events()[-1]
    assert (event.kind, event.tenant) == ("session refused", "bob")
    assert refusals(play) == {"sessions": 1}
    play.open(token="alice")
    play.close(bob.number)
    assert play.open(token="bob").tenant.sessions == 1


@pytest.mark.parametrize(("asking", "named"), [("alice", "session 3 of tenant bob"), ("root", "session 3 (secret.py)")])
def test_who_holds_the_memory_is_named_without_what_anothers_program_is_called(asking, named):
    play = shared(device_memory=20)
    own = play.open(token=asking).number
    play.session = play.open(label="secret.py", token="bob").number
    play.array(10)
    play.session = own
    play.with_call()
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))
    play.send(m.Await(5, (11,)))
    for now in range(100, 200):
        play.tick(float(now))
    text = next(each.status.message for each in play.outbox() if isinstance(each, m.Awaited))
    assert named in text
    assert ("secret" in text) == (asking == "root")


def test_a_tenant_at_its_quota_of_memory_waits_and_fails_alone():
    play = shared(device_memory=100, memory=20)
    play.session = bob = play.open(token="bob").number
    play.with_call()
    play.array(10)
    (first,) = runs(play.send(m.Launch(1, (10,), (11,), ())))
    assert runs(play.send(m.Launch(1, (10,), (12,), ()))) == []
    play.session = alice = play.open(token="alice").number
    play.with_call()
    play.array(10)
    assert len([runs(play.send(m.Launch(1, (10,), (handle,), ()))) for handle in (11, 12)]) == 2
    play.proxy(bob, m.Await(5, (12,)))
    play.worker(0, m.Done(((first.sequence, 0, 1),)))
    play.outbox()
    answers = []
    for now in (100.0, 101.0, 102.0):
        play.tick(now)
        answers += [message for message in play.outbox() if isinstance(message, m.Awaited)]
    (awaited,) = answers
    assert awaited.status.code == Code.RESOURCE_EXHAUSTED
    assert "tenant bob has 16 B of its quota `memory`, 20 B of each device" in awaited.status.message
    assert alice in play.controller.sessions
    assert refusals(play) == {"memory": 1}
    assert refusals(play, "alice") == {}


def test_a_launch_that_no_device_has_memory_for_counts_as_a_refusal() -> None:
    play = playing(device_memory=10)
    play.with_call()
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))
    assert awaited(play, 11).code == Code.RESOURCE_EXHAUSTED
    assert refusals(play) == {"device memory": 1}


def test_a_quota_that_is_raised_lets_go_on_what_waits_for_it():
    play = shared(device_memory=100, memory=20)
    play.session = play.open(token="bob").number
    play.with_call()
    play.array(10)
    (first,) = runs(play.send(m.Launch(1, (10,), (11,), ())))
    assert runs(play.send(m.Launch(1, (10,), (12,), ()))) == []
    play.ask(play.connect("operator", token="root"), m.SetTenant("bob", limits={"memory": 0}))
    play.tick(100.0)
    assert len(runs(play.outbox())) == 1
    assert first.results == (11,)


def test_a_launch_that_needs_no_memory_without_its_quota_continues_when_the_quota_is_removed():
    play = playing(device_memory=20, memory=20)
    play.with_call(donated=(0,))
    play.array(10)
    view = Rearrange((0,), (on(0),), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))
    play.send(m.RegisterProgram(5, single("view", (on(0),), view)))
    play.done(*[each.sequence for each in runs(play.send(m.Launch(5, (10,), (11,), ())))])
    play.array(12)
    assert runs(play.send(m.Launch(1, (10,), (13,), ()))) == [], "a quota counts the copy of the array"
    play.ask(play.connect("operator", token="root"), m.SetTenant("bob", limits={"memory": 0}))
    for now in (100.0, 101.0, 102.0):
        play.tick(now)
    assert [each.results for each in runs(play.outbox())] == [(13,)]


def test_slices_have_no_more_devices_than_the_quota():
    play = shared("1x1x4", devices=3)
    play.session = play.open(token="bob").number
    play.outbox()
    (added,) = play.send(m.AddSlice(1, SliceRequest(2)))
    assert added.status.code == Code.OK
    (refused,) = play.send(m.AddSlice(2, SliceRequest(2)))
    assert "tenant bob has reached its quota `devices` of 3: its slices have 2" in refused.status.message
    assert refusals(play) == {"devices": 1}


def test_more_launches_than_the_quota_are_errors():
    play = shared(launches=2)
    play.session = play.open(token="bob").number
    play.with_call()
    play.array(10)
    for handle in (11, 12, 13):
        play.proxy(play.session, m.Launch(1, (10,), (handle,), ()))
    started = runs(play.outbox())
    assert [run.results for run in started] == [(11,), (12,)]
    (awaited,) = play.send(m.Await(5, (13,)))
    assert "its quota `launches` of 2" in awaited.status.message
    assert refusals(play) == {"launches": 1}
    play.done(*(run.sequence for run in started))
    assert len(runs(play.send(m.Launch(1, (10,), (14,), ())))) == 1


# ---- memory on all devices


def on_both_devices(play: Play) -> None:
    """Make one array of 8 bytes on each of two devices."""
    play.array(10)
    play.with_put(3, device=1)
    play.report(0, m.FeedsArrived(play.session, (900,)))
    (run,) = play.send(m.Launch(3, (), (11,), (900,), traceback_id=77))
    play.done(run.sequence)


def test_a_tenant_at_its_quota_of_memory_on_all_devices_waits_and_fails_alone():
    play = playing(device_memory=100, total_memory=20)
    on_both_devices(play)
    play.with_call()
    assert runs(play.send(m.Launch(1, (10,), (12,), ()))) == [], "8 bytes more, on a device with 8 of 100"
    bob, play.session = play.session, play.open(token="alice").number
    play.with_call()
    play.array(10)
    (hers,) = runs(play.send(m.Launch(1, (10,), (11,), ())))
    play.done(hers.sequence)
    play.session = bob
    status = awaited(play, 12)
    assert status.code == Code.RESOURCE_EXHAUSTED
    assert "tenant bob has 16 B of its quota `total_memory`, 20 B" in status.message
    assert "session 2 (script.py): 8 B" in status.message


def test_the_parts_of_a_node_on_several_islands_count_together_for_the_memory_on_all_devices():
    play = playing("2x1x1", total_memory=20)
    buffer = HostBuffer(0, (2,), None, None)
    play.send(m.RegisterProgram(5, single("put", (), HostToDevice((buffer,), (on(0, 1),)), feeds=1)))
    play.array(10)
    for host in range(2):
        play.report(host, m.FeedsArrived(play.session, (1,)))
    assert runs(play.send(m.Launch(5, (), (11,), (1,)))) == [], "8 bytes, and 8 on each island"
    assert len(runs(play.send(m.Release((10,))))) == 2
    assert play.controller.ledger.total == 16


def test_what_is_released_on_another_device_counts_for_the_memory_on_all():
    play = playing(device_memory=100, total_memory=20)
    on_both_devices(play)
    play.with_call()
    assert runs(play.send(m.Launch(1, (10,), (12,), ()))) == []
    assert len(runs(play.send(m.Release((11,))))) == 1


@pytest.mark.parametrize("quota", ["memory", "total_memory"])
def test_the_error_of_a_quota_has_who_made_the_arrays_and_the_stack_of_the_request(quota):
    """From them, jaxlib's client prints the lines of the user's program."""
    play = playing(device_memory=100, **{quota: 20})
    play.with_call()
    play.array(10)
    (run,) = runs(play.send(m.Launch(1, (10,), (11,), (), traceback_id=77)))
    assert runs(play.send(m.Launch(1, (10,), (12,), (), traceback_id=78))) == []
    play.done(run.sequence)
    status = awaited(play, 12)
    assert f"`{quota}`" in status.message
    report = msgspec.msgpack.decode(status.payloads[m.MEMORY_REPORT], type=m.MemoryReport)
    assert {(h.traceback_id, h.producer, h.ready, h.ready_bytes) for h in report.holders} == {
        (0, "put", 1, 8),
        (77, "f", 1, 8),
    }


# ---- uploads


def upload(play: Play, session: int, *feeds: int) -> list[tuple[tuple[str, int], Status]]:
    play.worker(0, m.FeedsArrived(session, feeds))
    return closings(play)


def test_more_uploads_than_the_quota_end_the_session_that_has_sent_them():
    play = playing(uploads=3)
    bob, second, alice = play.session, play.open(token="bob").number, play.open(token="alice").number
    assert upload(play, bob, 1, 2) == []
    assert upload(play, alice, *range(100)) == []
    assert upload(play, second, 3) == [], "all sessions of a tenant count"
    ((who, status),) = upload(play, second, 4)
    assert who == ("session", second)
    assert status.code == Code.RESOURCE_EXHAUSTED
    text = "tenant bob has reached its quota `uploads` of 3: 4 buffers that no launch has used yet"
    assert status.message == text
    assert {bob, alice} < set(play.controller.sessions)
    assert upload(play, bob, 5) == [], "the session's memory is free"
    assert refusals(play) == {"uploads": 1}


def test_an_upload_that_a_launch_uses_counts_no_more():
    play = playing(uploads=1)
    play.with_put()
    for number in range(5):
        assert upload(play, play.session, number) == []
        (run,) = runs(play.send(m.Launch(2, (), (10 + number,), (number,))))
        play.done(run.sequence)
    play.send(m.Launch(2, (), (20,), (50,)))
    play.send(m.Launch(2, (), (21,), (51,)))
    assert upload(play, play.session, 50, 51) == [], "awaited: none of them is early"


# ---- compilations


def register(play: Play, function: int, devices: tuple[int, ...] = (0,)) -> list[Status]:
    """Register a function whose source has arrived. Return the errors."""
    play.worker(0, m.FeedsArrived(play.session, (900 + function,)))
    replies = play.send(m.RegisterFunction(function, f"content {function}", 900 + function, (devices,)))
    return [each.status for each in replies if isinstance(each, m.FunctionReady)]


def test_more_functions_than_the_quota_are_not_compiled_at_a_time():
    play = playing(compiles=2)
    bob, play.session = play.session, play.open(token="bob").number
    assert register(play, 1) == []
    play.session = bob
    assert register(play, 1) == [], "another session of the tenant waits for the same compilation"
    (status,) = register(play, 2)
    assert status.code == Code.RESOURCE_EXHAUSTED
    assert status.message == "tenant bob has reached its quota `compiles` of 2: these are being compiled"
    play.session = play.open(token="alice").number
    assert [register(play, number) for number in (1, 2, 3)] == [[], [], []]
    play.session = bob
    name = play.controller.sessions[bob].functions[1]
    play.worker(0, m.Compiled(name, OK, b"", 0.1, False))
    play.outbox()
    assert register(play, 2) == []
    assert refusals(play) == {"compiles": 1}


def test_a_function_that_is_compiled_on_several_hosts_counts_once():
    play = playing("1x2x1", compiles=2)
    play.worker(1, m.FeedsArrived(play.session, (901,)))
    assert register(play, 1, (0, 1)) == []
    assert register(play, 2) == []
    assert len(register(play, 3)) == 1


# ---- texts


def test_the_error_of_a_quota_names_the_tenants_own_holdings_only():
    play = playing(device_memory=100, memory=20)
    bob = play.session
    play.session = play.open(label="other.py", token="alice").number
    play.array(10)
    play.session = bob
    play.with_call()
    play.array(10)
    (run,) = runs(play.send(m.Launch(1, (10,), (11,), ())))
    assert runs(play.send(m.Launch(1, (10,), (12,), ()))) == []
    play.done(run.sequence)
    status = awaited(play, 12)
    assert "needs 8 B, and tenant bob has 16 B of its quota `memory`, 20 B of each device" in status.message
    assert "held there by session 2 (script.py): 16 B" in status.message
    assert "or ask an operator for a larger quota (`atoll tenants set bob`)" in status.message
    assert "alice" not in status.message


@pytest.mark.parametrize(
    ("needs", "has", "limit", "texts"),
    [
        (MIB, MIB + 4, 2 * MIB, ("1048576 B", "1048580 B", "2097152 B")),
        (MIB, 2 * MIB, 2 * MIB, ("1.0 MiB", "2.0 MiB", "2.0 MiB")),
    ],
)
def test_amounts_are_given_in_bytes_if_rounded_ones_seem_to_fit(needs, has, limit, texts):
    assert _amounts(needs, has, limit) == texts


def test_free_memory_is_given_in_bytes_if_it_seems_to_be_enough():
    assert _amounts(MIB, MIB - 4, 4 * MIB, adds_up=False) == ("1048576 B", "1048572 B", "4194304 B")


# ---- what workers report


LARGE = ("float32", (16 << 20,))  # 64 MiB
SMALL = ("float32", (1,))


def info(*outputs: tuple[str, tuple[int, ...]], donated: tuple[int, ...] = (), allocated: int = 0) -> bytes:
    """Encode a worker's report about a function."""
    types = tuple(m.OutputInfo(*each, None, "device", b"") for each in outputs)
    stats = {"output_size_in_bytes": allocated} if allocated else {}
    return msgspec.msgpack.encode(m.FunctionInfo("f", b"", None, (), types, donated, stats, 0))


def a_function(play: Play, devices: tuple[int, ...] = (0,), number: int = 1) -> str:
    """Register a function, which is then being compiled on host 0. Return its name."""
    play.worker(0, m.FeedsArrived(play.session, (900 + number,)))
    play.send(m.RegisterFunction(number, f"content {number}", 900 + number, (devices,)))
    return play.controller.sessions[play.session].functions[number]


def array(dtype: str, shape: tuple[int, ...], *devices: int) -> ArraySpec:
    return ArraySpec(dtype, shape, Sharding(devices or (0,)))


def calls(play: Play, *outputs: ArraySpec, program: int = 1, function: int = 1, **options: Any) -> list[Any]:
    """Register a program that calls a function."""
    devices = options.pop("devices", (0,))
    call = Call(function, tuple(range(len(options.get("donated", ())))), outputs, devices, **options)
    return play.send(m.RegisterProgram(program, single("p", outputs[: len(call.inputs)], call)))


def outcome(play: Play, program: int = 1, arguments: tuple[int, ...] = (), results: tuple[int, ...] = (20,)) -> str:
    """Return why a launch fails, or "" if it starts."""
    if runs(play.send(m.Launch(program, arguments, results, ()))):
        return ""
    return awaited(play, results[0]).message


def used(play: Play) -> list[int]:
    """Return the bytes in use on each device. All of them must be the tenant's."""
    tenant = play.controller.sessions[play.session].tenant.memory
    assert tenant is not None
    found = [tenant.used.get((0, ordinal), 0) for ordinal in range(2)]
    assert found == list(play.controller.ledger.used.values()), "only this tenant uses memory"
    return found


def test_a_program_that_declares_smaller_outputs_than_its_function_has_is_refused():
    play = playing("1x1x2", memory=600 * MIB)
    play.report(0, m.Compiled(a_function(play), OK, info(LARGE), 0.1, False, 0, False, "f"))
    calls(play, array(*SMALL))
    text = f"'p': nodes[0]: output 0 of the function f has shards of {LARGE[0]}{list(LARGE[1])}, not of float32[1]"
    assert outcome(play) == text
    assert used(play) == [0, 0]


def test_a_program_that_is_registered_while_its_function_is_compiled_is_checked_and_accounted_by_the_report():
    play = playing("1x1x2", memory=600 * MIB)
    name = a_function(play)
    assert calls(play, array(*SMALL), program=1) == []
    assert calls(play, array(*LARGE), program=2) == []
    assert outcome(play, 2) == "program 'p' calls a function that is being compiled"
    replies = play.report(0, m.Compiled(name, OK, info(LARGE), 0.1, False, 5 * MIB))
    assert [type(each) for each in replies] == [m.FunctionReady, m.RegisterPlan]
    assert "output 0 of the function" in outcome(play, 1, results=(21,))
    assert outcome(play, 2, results=(22,)) == ""
    assert used(play) == [69 * MIB, 0], "including its temporary memory"


def test_a_launch_waits_in_line_until_the_program_is_lowered_for_which_its_session_did_not_wait():
    play = playing("1x1x2", memory=600 * MIB)
    name = a_function(play)
    calls(play, array(*LARGE))
    play.worker(0, m.Compiled(name, OK, info(LARGE), 0.1, False))
    play.proxy(play.session, m.Launch(1, (), (20,), ()))
    assert len(runs(play.outbox())) == 1


def test_a_quota_holds_what_functions_really_return():
    play = playing("1x1x2", memory=150 * MIB)
    play.report(0, m.Compiled(a_function(play), OK, info(LARGE), 0.1, False))
    calls(play, array(*LARGE))
    for handle in (20, 21):
        (run,) = runs(play.send(m.Launch(1, (), (handle,), ())))
        play.done(run.sequence)
    assert "has 128.0 MiB of its quota `memory`, 150.0 MiB" in outcome(play, results=(22,))


def test_the_padding_of_layouts_is_accounted():
    play = playing("1x1x2", memory=600 * MIB)
    allocated = 256 * MIB + 2 * 8
    outputs = info(LARGE, LARGE, allocated=allocated)
    play.report(0, m.Compiled(a_function(play, (0, 1)), OK, outputs, 0.1, False))
    calls(play, array(*LARGE, 0, 1), array(*LARGE, 0, 1), devices=(0, 1))
    assert outcome(play, results=(20, 21)) == ""
    assert used(play) == [256 * MIB, 256 * MIB]


@pytest.mark.parametrize(
    ("outputs", "options", "text"),
    [
        ((), {}, "has 1 output, not 0"),
        ((SMALL, SMALL), {}, "has 1 output, not 2"),
        ((("int32", (1,)),), {}, "has shards of float32[1], not of int32[1]"),
        ((SMALL,), {"devices": (1,)}, "runs on other devices than those of the call"),
        ((SMALL,), {"on": 1}, "is on other devices than those of the call"),
        ((SMALL,), {"donated": (0,)}, "does not consume its input 0, which the call donates"),
    ],
)
def test_what_a_call_declares_is_what_the_worker_reports(outputs, options, text):
    play = playing("1x1x2", memory=600 * MIB)
    play.report(0, m.Compiled(a_function(play), OK, info(SMALL), 0.1, False, 0, False, "f"))
    place = options.pop("on", options.get("devices", (0,))[0])
    calls(play, *(array(*each, place) for each in outputs), **options)
    play.array(9)
    arguments = (9,) * len(options.get("donated", ()))
    assert text in outcome(play, arguments=arguments, results=(20, 21)[: len(outputs)] or (20,))


def test_programs_that_wait_for_a_function_fail_with_it_and_leave_nothing():
    play = playing("1x1x2", memory=600 * MIB)
    name = a_function(play)
    calls(play, array(*SMALL))
    play.report(0, m.Compiled(name, Status(Code.INTERNAL, "no such operation"), b"", 0.1, False))
    assert outcome(play) == "no such operation (in p)"
    functions = play.controller.functions
    assert (functions.users, functions.reports) == ({}, {})


@pytest.mark.parametrize("end", ["release", "close"])
def test_nothing_is_left_of_programs_that_wait_for_a_function(end):
    play = playing("1x1x2", memory=600 * MIB)
    a_function(play)
    calls(play, array(*SMALL))
    if end == "release":
        play.send(m.ReleaseFunction(1))
        assert play.controller.functions.users, "the program needs it"
        play.send(m.ReleaseProgram(1))
    else:
        play.close(play.session)
    assert play.controller.functions.users == {}


def test_a_program_waits_for_all_functions_that_it_calls():
    play = playing("1x1x2", memory=600 * MIB)
    names = [a_function(play, number=number) for number in (1, 2)]
    one = array(*SMALL)
    two_calls = Program("p", (), (Call(1, (), (one,), (0,)), Call(2, (), (one,), (0,))), (0, 1))
    play.send(m.RegisterProgram(1, two_calls))
    for name in names:
        assert "is being compiled" in outcome(play, results=(20, 21))
        play.send(m.Release((20, 21)))
        play.report(0, m.Compiled(name, OK, info(SMALL), 0.1, False))
    assert outcome(play, results=(30, 31)) == ""


def test_so_many_programs_of_a_session_may_wait_for_functions():
    play = playing("1x1x2", memory=600 * MIB)
    a_function(play)
    for number in range(1, MAX_UNCOMPILED + 2):
        calls(play, array(*SMALL), program=number)
    assert "being compiled" in outcome(play, MAX_UNCOMPILED)
    assert "register 'p' when its functions are compiled" in outcome(play, MAX_UNCOMPILED + 1, results=(21,))


def test_an_output_is_not_written_to_memory_that_another_array_has_too():
    """The worker copies an input that shares its memory with another array before it runs the function."""
    play = playing("1x1x2", memory=600 * MIB)
    play.report(0, m.Compiled(a_function(play), OK, info(("float32", (2,)), donated=(0,)), 0.1, False))
    calls(play, on(0), donated=(0,))
    play.array(10)
    view = Rearrange((0,), (on(0),), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))
    play.send(m.RegisterProgram(3, single("view", (on(0),), view)))
    handle = 10
    for number in range(3):
        (run,) = runs(play.send(m.Launch(3, (handle,), (20 + number,), ())))
        play.done(run.sequence)
        (run,) = runs(play.send(m.Launch(1, (handle,), (30 + number,), ())))
        play.done(run.sequence)
        play.send(m.Release((handle,)))
        handle = 30 + number
    assert used(play) == [4 * 8, 0], "three arrays that only views have, and the last output"
    play.send(m.Release((20, 21, 22)))
    (run,) = runs(play.send(m.Launch(1, (handle,), (40,), ())))
    play.done(run.sequence)
    assert used(play) == [8, 0]


def test_a_snapshot_keeps_programs_that_wait_for_functions():
    play = playing("1x1x2", memory=600 * MIB)
    name = a_function(play)
    calls(play, array(*SMALL))
    play.controller = load_controller(dumped(play.controller))
    play.report(0, m.Compiled(name, OK, info(SMALL), 0.1, False))
    assert outcome(play) == ""


def test_what_the_controller_reads_of_a_report_stands_where_the_worker_writes_it():
    encoded = info(LARGE, SMALL, donated=(3,), allocated=7)
    read = msgspec.msgpack.decode(encoded, type=m.FunctionOutputs)
    whole = msgspec.msgpack.decode(encoded, type=m.FunctionInfo)
    assert [(each.dtype, each.shape) for each in read.outputs] == [(each.dtype, each.shape) for each in whole.outputs]
    assert (read.donated, read.memory_stats) == (whole.donated, whole.memory_stats)


@pytest.mark.parametrize(
    ("outputs", "allocated", "sizes"),
    [
        ((("float32", (3,)), ("bool", (2, 2))), 0, (12, 4)),
        ((("int4", (1000,)),), 500, (500,)),
        ((("token", ()), ("float32", (0,))), 16, (0, 0)),
        ((("float32", (2,)), ("float32", (6,))), 2 * 8 + 64, (16, 48)),
        ((("float32", (2,)), ("float32", (6,))), 2 * 8 + 32, (8, 24)),
    ],
)
def test_the_size_of_each_output(outputs, allocated, sizes):
    assert output_sizes(outputs, allocated) == sizes
