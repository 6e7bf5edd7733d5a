"""Tests of colocated Python: what is started, registered, launched and rejected."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.errors import OK, Code, Status
from atoll.protocol import messages as m
from atoll.protocol.ifrt import compile_pb2
from atoll.protocol.messages.python_messages import (
    ClientSettings,
    PythonFunction,
    PythonHosts,
    PythonProgram,
    with_settings,
)
from tests.ifrt.rig import Rig, check_refused, node_of, on, spec_proto
from tests.protocol.translation.wire import compile_request

SETTINGS = ClientSettings("/home/user", ("/home/user/lib",), {"jax_enable_x64": True})
LANGUAGE = "jax_colocated_python_v0.0.1"
DEEP = b"\x91" * 200_000 + b"\xc0"  # nested lists: Python 3.13 reads 9,000 levels


def custom_call(**fields: Any) -> Any:
    """Return a request for a function of one array on device 2. Its island has only the devices 2 and 3."""
    program = compile_pb2.CustomCallProgram(
        type=LANGUAGE,
        name="add_one",
        serialized_program_text=with_settings(SETTINGS, b"a pickle"),
        devices={"device_ids": [2]},
        input_specs=[spec_proto(on(2))],
        output_specs=[spec_proto(on(2))],
    )
    for name, value in fields.items():
        program.ClearField(name)
        program.MergeFrom(compile_pb2.CustomCallProgram(**{name: value}))
    request = compile_request()
    request.program.type_name = "xla::ifrt::CustomCallProgram"
    request.program.data = program.SerializeToString()
    return request


def registered(rig: Rig) -> tuple[m.RegisterFunction, Any]:
    """Return the last registered function, and its source."""
    (message,) = rig.take()
    source = msgspec.msgpack.decode(rig.cluster.uploads[-1][2], type=m.FunctionSource)
    assert source.is_python
    return message, msgspec.msgpack.decode(source.program, type=PythonProgram)


def ready(rig: Rig, message: m.RegisterFunction, status: Status = OK) -> None:
    rig.receive(m.FunctionReady(message.function, status, b""))


def compiled(rig: Rig, request: Any | None = None) -> int:
    """Return the handle of an executable."""
    op = rig.send("compile", request if request is not None else custom_call())
    while rig.answer(op) is None:
        ready(rig, registered(rig)[0])
    response = rig.answer(op)
    assert response is not None
    return int(response.compile.executable)


def test_all_of_an_islands_devices_get_processes_before_the_first_function_is_loaded(rig: Rig):
    op = rig.send("compile", custom_call())
    message, source = registered(rig)
    assert (message.assignment, source) == (((2, 3),), PythonHosts((2, 3), SETTINGS))
    ready(rig, message)
    message, source = registered(rig)
    assert (message.assignment, source) == (((2,),), PythonFunction("add_one", b"a pickle", SETTINGS))
    assert rig.answer(op) is None
    ready(rig, message)
    response = rig.answer(op)
    assert response is not None
    assert (response.compile.name, list(response.compile.device_ids)) == ("add_one", [2])


def test_processes_are_started_once_an_island(rig: Rig):
    compiled(rig)
    rig.send("compile", custom_call(name="another"))
    _, source = registered(rig)
    assert isinstance(source, PythonFunction)


def test_functions_have_names_of_their_own_though_their_text_is_the_same(rig: Rig):
    rig.send("compile", custom_call())
    ready(rig, rig.take()[0])
    (first,) = rig.take()
    ready(rig, first)
    rig.send("compile", custom_call())
    (second,) = rig.take()
    assert first.content != second.content


def test_processes_that_do_not_start_are_the_error_of_the_function_and_are_tried_again(rig: Rig):
    op = rig.send("compile", custom_call())
    ready(rig, registered(rig)[0], Status(int(Code.ABORTED), "it did not start"))
    check_refused(rig.answer(op), Code.ABORTED, "it did not start")
    rig.send("compile", custom_call())
    _, source = registered(rig)
    assert isinstance(source, PythonHosts)


def execute(rig: Rig, handle: int, stream: int, result: int) -> Any:
    options = {"execution_stream_id": stream}
    return rig.send("execute", executable=handle, arguments=[40], options=options, results=[result])


def test_a_call_names_the_stream_of_its_thread(rig: Rig):
    handle = compiled(rig)
    rig.make(40, on(2))
    execute(rig, handle, 7, 41)
    program, launch = rig.take_launch()
    call: Any = node_of(program)
    assert (call.stream, call.devices, launch.arguments, launch.results) == (7, (2,), (40,), (41,))
    execute(rig, handle, 7, 42)
    assert len(rig.take()) == 1  # the program is known
    execute(rig, handle, 8, 43)
    program, _ = rig.take_launch()
    call = node_of(program)
    assert call.stream == 8


def test_an_executable_keeps_a_bounded_number_of_programs(rig: Rig):
    handle = compiled(rig)
    rig.make(40, on(2))
    released = 0
    for stream in range(80):
        execute(rig, handle, stream, 100 + stream)
        sent = rig.take()
        released += sum(isinstance(message, m.ReleaseProgram) for message in sent)
        rig.receive(m.CreditReturned(1))
    assert released == 16


def test_outputs_have_the_shardings_that_the_client_announced(rig: Rig):
    handle = compiled(rig)
    rig.make(40, on(2))
    (output,) = rig.ask("execute", executable=handle, arguments=[40]).execute.outputs
    assert output.sharding == spec_proto(on(2)).sharding


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"type": "another"}, Code.UNIMPLEMENTED, "programs of type 'another'"),
        ({"devices": {"device_ids": []}}, Code.INVALID_ARGUMENT, "needs one or more distinct devices"),
        ({"devices": {"device_ids": [2, 2]}}, Code.INVALID_ARGUMENT, "needs one or more distinct devices"),
        ({"devices": {"device_ids": [99]}}, Code.INVALID_ARGUMENT, "device 99 does not exist"),
        ({"output_specs": [spec_proto(on(3))]}, Code.INVALID_ARGUMENT, "which are not devices of the function"),
        ({"input_specs": [spec_proto(on(2, dtype="token"))]}, Code.INVALID_ARGUMENT, "contains no data"),
        (
            {"serialized_program_text": b"atoll.python\0\x45\x0d\x03\0\x94\xa0\x90\x80" + DEEP},
            Code.INVALID_ARGUMENT,
            "cannot decode the settings",
        ),
        (
            {"serialized_program_text": b"atoll.python\0\x02\0\0\0\xc1\xc1"},
            Code.INVALID_ARGUMENT,
            "cannot decode the settings",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(rig: Rig, fields: dict[str, Any], code: Code, text: str):
    check_refused(rig.ask("compile", custom_call(**fields)), code, text)
    assert rig.take() == []


def test_arguments_of_another_type_are_refused(rig: Rig):
    handle = compiled(rig)
    rig.make(40, on(2, shape=(5,)))
    response = rig.ask("execute", executable=handle, arguments=[40], results=[41])
    check_refused(response, Code.INVALID_ARGUMENT, "add_one takes float32[4] on devices [2] as argument 0")


def test_a_client_without_the_plug_in_brings_no_settings(rig: Rig):
    rig.send("compile", custom_call(serialized_program_text=b"a pickle"))
    _, source = registered(rig)
    assert source.settings == ClientSettings()
