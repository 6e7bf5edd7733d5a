"""Tests of compiling, running, querying and releasing executables."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atoll.errors import OK, Code, Details, Kind, failure
from atoll.ir.program import Call, Program, Transfer
from atoll.ir.types import ArraySpec, Even, Replicated, Sharding
from atoll.protocol import messages as m
from atoll.protocol import submission
from tests.ifrt.rig import MINTED, STACK, Rig, check_refused, node_of, on, program_of
from tests.protocol.translation.wire import compile_request

FAILURE = failure(Code.DATA_LOSS, "it burnt", Details(Kind.ISLAND, (1,)))
SHARD = ("float32", (4,))


def info(inputs: int = 1, outputs: int = 1, donated: tuple[int, ...] = ()) -> bytes:
    output = m.OutputInfo("float32", (4,), None, "device", b"{0}")
    return msgspec.msgpack.encode(
        m.FunctionInfo("f", b"print", None, (b"{0}",) * inputs, (output,) * outputs, donated, {}, 10, (SHARD,) * inputs)
    )


OUTPUT = ArraySpec("float32", (4,), Sharding((0,), Replicated(), "device"))


def compiled(rig: Rig, **shape: Any) -> tuple[int, int]:
    """Return the handle of an executable on device 0, and its function's number."""
    op = rig.send("compile", compile_request())
    (asked,) = rig.take()
    rig.receive(m.FunctionReady(asked.function, OK, info(**shape)))
    return rig.answer(op).compile.executable, asked.function


# ---- compiling


def test_a_function_is_compiled_by_the_workers(rig: Rig):
    op = rig.send("compile", compile_request())
    (asked,) = rig.take()
    ((hosts, feed, source),) = rig.cluster.uploads
    assert (hosts, asked.feed, asked.assignment) == ((0,), feed, ((0,),))
    assert msgspec.msgpack.decode(source, type=m.FunctionSource).program == b"module"
    assert rig.answer(op) is None
    rig.receive(m.FunctionReady(asked.function, OK, info()))
    reply = rig.answer(op).compile
    assert (reply.name, list(reply.device_ids), reply.num_devices) == ("f", [0], 1)
    assert rig.ask("check_future", future=reply.ready_future_handle).WhichOneof("kind") == "check_future"


def test_a_function_that_does_not_compile_is_an_error_without_a_stack(rig: Rig):
    op = rig.send("compile", compile_request())
    (asked,) = rig.take()
    rig.receive(m.FunctionReady(asked.function, FAILURE, b""))
    response = rig.answer(op)
    check_refused(response, Code.DATA_LOSS, "it burnt")
    assert not response.meta.status.payload  # JAX raises it in the call that requested it


def test_an_executable_that_is_destructed_releases_all_it_had(rig: Rig):
    handle, function = compiled(rig)
    rig.make(1, on(0))
    rig.ask("execute", executable=handle, arguments=[1], results=[5])
    _, launch = rig.take_launch()
    assert rig.ask("executable_destruct", executable=handle).WhichOneof("kind") == "executable_destruct"
    assert rig.take() == [m.ReleaseProgram(launch.program), m.ReleaseFunction(function)]
    check_refused(rig.ask("executable_destruct", executable=handle), Code.NOT_FOUND, "unknown executable")


def test_a_function_for_lost_devices_compiles_where_it_is_known_and_its_runs_fail(rig: Rig):
    rows = [{"replica_device_ids": [device]} for device in range(2)]
    here, lost = (
        compile_request(device_assignment={"replica_count": 1, "computation_count": 1, "computation_devices": [row]})
        for row in rows
    )
    op = rig.send("compile", lost)
    (asked,) = rig.take()
    rig.receive(m.FunctionReady(asked.function, FAILURE, b""))
    check_refused(rig.answer(op), Code.DATA_LOSS, "it burnt")  # its result types are not known yet
    rig.send("compile", here)
    (asked,) = rig.take()
    rig.receive(m.FunctionReady(asked.function, OK, info()))
    op = rig.send("compile", lost)
    (asked,) = rig.take()
    rig.receive(m.FunctionReady(asked.function, FAILURE, b""))
    executable = rig.answer(op).compile.executable
    rig.make(1, on(1))
    reply = rig.ask("execute", executable=executable, arguments=[1], options={"fill_status": True}).execute
    (output,) = reply.outputs
    check_refused(rig.ask("check_value_ready", values=[output.array]), Code.DATA_LOSS, "it burnt")
    check_refused(rig.ask("fetch_execute_result", status_handle=reply.status_handle), Code.DATA_LOSS, "it burnt")
    rig.ask("executable_destruct", executable=executable)
    assert rig.take() == []


def one_device(device: int) -> Any:
    rows = [{"replica_device_ids": [device]}]
    return compile_request(device_assignment={"replica_count": 1, "computation_count": 1, "computation_devices": rows})


def test_a_function_for_lost_devices_is_compiled_on_another_island_and_its_runs_fail(rig: Rig):
    op = rig.send("compile", one_device(3))
    (asked,) = rig.take()
    rig.receive(m.FunctionReady(asked.function, FAILURE, b""))
    (elsewhere,) = rig.take()
    assert elsewhere.assignment == ((1,),)  # the same position in the other island
    rig.receive(m.FunctionReady(elsewhere.function, OK, info()))
    assert rig.take() == [m.ReleaseFunction(elsewhere.function)]
    reply = rig.answer(op).compile
    assert list(reply.device_ids) == [3]
    rig.make(1, on(3))
    outputs = rig.ask("execute", executable=reply.executable, arguments=[1], options={"fill_status": True}).execute
    check_refused(rig.ask("fetch_execute_result", status_handle=outputs.status_handle), Code.DATA_LOSS, "it burnt")


def test_a_function_for_lost_devices_fails_if_the_other_islands_are_lost(rig: Rig):
    op = rig.send("compile", one_device(3))
    (asked,) = rig.take()
    rig.receive(m.FunctionReady(asked.function, FAILURE, b""))
    (elsewhere,) = rig.take()
    rig.receive(m.FunctionReady(elsewhere.function, failure(Code.DATA_LOSS, "too", Details(Kind.ISLAND, (0,))), b""))
    assert rig.take() == []
    check_refused(rig.answer(op), Code.DATA_LOSS, "it burnt")


# ---- running


def run(rig: Rig, handle: int, **fields: Any) -> Any:
    return rig.ask("execute", executable=handle, arguments=[1], results=[5], **fields)


def test_a_run_is_one_launch_of_one_call_and_the_program_is_registered_once(rig: Rig):
    handle, function = compiled(rig)
    rig.make(1, on(0))
    response = run(rig, handle)
    assert (response.execute.status_handle, list(response.execute.outputs)) == (0, [])
    assert list(response.meta.destroyed_user_context_ids) == []  # the results keep the stack
    program, launch = rig.take_launch()
    argument = ArraySpec(*SHARD, Sharding((0,), Even((4,))))
    assert (program.arguments, node_of(program)) == ((argument,), Call(function, (0,), (OUTPUT,), (0,)))
    assert (launch.arguments, launch.results, launch.traceback_id) == ((1,), (5,), STACK)
    rig.ask("execute", executable=handle, arguments=[5], results=[6])
    (again,) = rig.take()
    assert (again.program, again.arguments, again.results) == (launch.program, (5,), (6,))


def test_results_that_the_client_does_not_number_are_described(rig: Rig):
    handle, _ = compiled(rig)
    rig.make(1, on(0))
    response = rig.ask("execute", executable=handle, arguments=[1])
    (output,) = response.execute.outputs
    assert output.array >= MINTED
    assert list(output.shape.dims) == [4]
    assert rig.session.arrays.spec(output.array) == OUTPUT


@pytest.mark.parametrize("status", [OK, FAILURE])
def test_a_run_whose_status_is_asked_for_has_a_completion(rig: Rig, status):
    handle, _ = compiled(rig)
    rig.make(1, on(0))
    response = run(rig, handle, options={"fill_status": True}, status_handle=8)
    assert response.execute.status_handle == 8
    registered, launch, asked, released = sent = rig.take()
    assert node_of(program_of(registered)[1]).completion
    result, completion = launch.results
    assert (result, asked.handles, released) == (5, (completion,), m.Release((completion,)))
    op = rig.send("fetch_execute_result", status_handle=8)
    assert rig.answer(op) is None
    rig.end_waits(sent, status)
    assert rig.answer(op).meta.status.code == status.code


@pytest.mark.parametrize(
    ("kept", "donated", "preserved", "deleted"),
    [([], (0,), (), True), ([0], (), (0,), False)],
)
def test_a_donated_argument_is_deleted_unless_the_caller_keeps_it(rig: Rig, kept, donated, preserved, deleted):
    handle, _ = compiled(rig, donated=(0,))
    rig.make(1, on(0))
    run(rig, handle, options={"non_donatable_input_indices": kept})
    program, _ = rig.take_launch()
    assert (node_of(program).donated, node_of(program).preserved) == (donated, preserved)
    assert rig.ask("is_array_deleted", array=1).is_array_deleted.deleted == deleted


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"executable": 1, "arguments": [1]}, Code.NOT_FOUND, "unknown executable handle 1"),
        ({"arguments": []}, Code.INVALID_ARGUMENT, "takes 1 argument, got 0"),
        ({"arguments": [8]}, Code.NOT_FOUND, "unknown array handle 8"),
        ({"arguments": [1], "device_ids": [1]}, Code.INVALID_ARGUMENT, "the devices that it was compiled for"),
    ],
)
def test_a_run_that_cannot_be_is_refused_and_its_results_and_status_have_the_error(rig: Rig, fields, code, text):
    handle, _ = compiled(rig)
    rig.make(1, on(0))
    fields = {"executable": handle, "results": [5], "options": {"fill_status": True}, "status_handle": 9} | fields
    check_refused(rig.ask("execute", **fields), code, text)
    check_refused(rig.ask("is_array_deleted", array=5), code, text)
    check_refused(rig.ask("fetch_execute_result", status_handle=9), code, text)
    assert not [message for message in rig.take() if isinstance(message, m.Launch)]


# ---- programs of several functions


def submitted(rig: Rig, program: Program, *fingerprints: bytes) -> Any:
    request = compile_request()
    request.program.type_name = "xla::ifrt::PluginProgram"
    data = submission.encode(submission.Submission(program, fingerprints))
    request.program.data = b"__serialized_plugin_program " + data
    return rig.ask("compile", request)


def test_a_traced_program_is_run_as_one_launch(rig: Rig):
    handle, function = compiled(rig)
    fingerprint = rig.session.executable(handle).fingerprint
    call = Call(0, (0,), (on(0),), (0,))
    transfer = Transfer((1,), (on(3),), reshard=True)
    reply = submitted(rig, Program("p", (on(0),), (call, transfer), (2,)), fingerprint).compile
    assert reply.name == "p"
    rig.make(1, on(0))
    rig.ask("execute", executable=reply.executable, arguments=[1], results=[5])
    program, launch = rig.take_launch()
    assert [type(node) for node in program.nodes] == [Call, Transfer]
    assert program.nodes[0].function == function
    assert (launch.arguments, launch.results) == ((1,), (5,))
    # The function is kept while the program needs it.
    rig.ask("executable_destruct", executable=handle)
    assert rig.take() == []
    rig.ask("executable_destruct", executable=reply.executable)
    assert rig.take() == [m.ReleaseProgram(launch.program), m.ReleaseFunction(function)]


def test_a_program_that_calls_what_the_session_has_not_compiled_is_refused(rig: Rig):
    program = Program("p", (on(0),), (Call(0, (0,), (on(0),), (0,)),), (1,))
    check_refused(submitted(rig, program, b"stranger"), Code.INVALID_ARGUMENT, "has not compiled")


# ---- queries


def test_costs_and_texts_are_a_workers_to_say(rig: Rig):
    handle, function = compiled(rig)
    op = rig.send("executable_cost_analysis", executable=handle)
    (asked,) = rig.take()
    assert (asked.what, asked.device, asked.function) == ("cost", 0, function)
    rig.receive(m.QueryReply(asked.query, OK, json.dumps({"flops": 2}).encode()))
    attributes = rig.answer(op).executable_cost_analysis.attributes.attributes
    assert attributes["flops"].float_value == 2.0
    op = rig.send("executable_program_text", executable=handle)
    (asked,) = rig.take()
    assert (asked.what, asked.function) == ("text", function)
    rig.receive(m.QueryReply(asked.query, OK, b"HloModule f"))
    assert rig.answer(op).executable_program_text.human_readable_program_text == "HloModule f"


@pytest.mark.parametrize("kind", ["executable_cost_analysis", "executable_program_text"])
def test_a_worker_that_cannot_say_is_an_error_inside_of_the_reply(rig: Rig, kind):
    handle, _ = compiled(rig)
    op = rig.send(kind, executable=handle)
    (asked,) = rig.take()
    rig.receive(m.QueryReply(asked.query, FAILURE, b""))
    response = rig.answer(op)
    assert response.meta.status.code == 0  # jaxlib's client would abort its process
    assert getattr(response, kind).status.message == FAILURE.details.in_text("it burnt")


def test_metadata_are_those_of_the_function(rig: Rig):
    handle, _ = compiled(rig, outputs=2, donated=(0,))
    reply = rig.ask("executable_metadata", executable=handle).executable_metadata
    assert list(reply.output_memory_kinds.memory_kind_lists[0].memory_kinds) == ["device", "device"]
    assert list(reply.donated_input_indices.donated_input_indices) == [0]
    assert len(reply.output_layouts_list.layouts) == 2
    assert reply.size_of_generated_code_in_bytes == 10


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("executable_mpmd_metadata", "mpmd_compiled_memory_stats_error"),
        ("executable_mpmd_cost_analysis", "status"),
    ],
)
def test_an_executable_of_one_mesh_has_no_mpmd_answers(rig: Rig, kind, status):
    handle, _ = compiled(rig)
    reply = getattr(rig.ask(kind, executable=handle), kind)
    assert getattr(reply, status).code == Code.INVALID_ARGUMENT


def test_executables_are_destructed_and_not_deleted(rig: Rig):
    handle, _ = compiled(rig)
    future = rig.ask("executable_delete", executable=handle).executable_delete.future
    check_refused(rig.ask("check_future", future=future), Code.UNIMPLEMENTED, "destructed, not deleted")
    assert not rig.ask("executable_is_deleted", executable=handle).executable_is_deleted.is_deleted


@pytest.mark.parametrize("kind", ["host_callback_poll", "host_callback_return"])
def test_callbacks_are_refused_with_advice(rig: Rig, kind):
    check_refused(rig.ask(kind), Code.UNIMPLEMENTED, "outside of jit")
