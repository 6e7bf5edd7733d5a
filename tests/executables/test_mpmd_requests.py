"""Tests of requests to compile IFRT IR programs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.errors import Code, StatusError
from atoll.executables.mpmd_requests import IFRT_IR_PROGRAM, MpmdRequest, mpmd_request
from atoll.ir.outline import Fragment
from atoll.protocol.callbacks import CALLBACKS_OPTION
from atoll.protocol.ifrt import compile_pb2, executables_pb2
from atoll.protocol.messages import FunctionSource

FRAGMENT = Fragment("f", "a", (5, 3))


def request(devices: tuple[int, ...] = (5, 3, 1), program: Any = None, options: Any = None) -> Any:
    message = executables_pb2.Compile()
    message.program.type_name = IFRT_IR_PROGRAM
    message.program.data = compile_pb2.IfrtIrProgram(ifrt_program=b"bytecode", **(program or {})).SerializeToString()
    message.compile_options.type_name = "xla::ifrt::IfrtIRCompileOptions"
    message.compile_options.data = compile_pb2.IfrtIrCompileOptions(
        device_ids=devices, compile_option_overrides=options or {}
    ).SerializeToString()
    return message


def read(message: Any) -> MpmdRequest:
    return mpmd_request(message, 8)


def source(content: bytes) -> FunctionSource:
    return msgspec.msgpack.decode(content, type=FunctionSource)


def test_the_outline_is_read_on_a_host_of_the_program() -> None:
    job = read(request()).outline_job()
    assert job.assignment == ((5,),)
    assert source(job.source) == FunctionSource(b"bytecode", b"", fragment=("", ""))


def test_a_fragment_is_compiled_with_its_options_for_its_mesh() -> None:
    build = {"num_replicas": 2, "num_partitions": 1, "device_assignment": {"replica_count": 1}, "device_memory_size": 7}
    read_request = read(request(options={"f_mesh_a": compile_pb2.CompileOptions(executable_build_options=build)}))
    job = read_request.fragment_job(FRAGMENT)
    assert job.assignment == ((5,), (3,))
    found = source(job.source)
    options = compile_pb2.CompileOptions.FromString(found.options).executable_build_options
    assert (found.program, found.fragment) == (b"bytecode", ("f", "a"))
    assert options.device_memory_size == 7
    assert not options.HasField("device_assignment")


def test_a_fragment_without_options_is_partitioned_over_its_mesh() -> None:
    job = read(request()).fragment_job(FRAGMENT)
    assert job.assignment == ((5, 3),)
    build = compile_pb2.CompileOptions.FromString(source(job.source).options).executable_build_options
    assert (build.num_partitions, build.use_spmd_partitioning) == (2, True)


@pytest.mark.parametrize(("message", "code", "text"), [
    (request(program={"ifrt_version": "0.1.0"}), Code.UNIMPLEMENTED, "versioned form"),
    (request(devices=()), Code.INVALID_ARGUMENT, "name no devices"),
    (request(devices=(1, 1)), Code.INVALID_ARGUMENT, "contains a device twice"),
    (request(devices=(8,)), Code.INVALID_ARGUMENT, "does not exist"),
])  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused(message: Any, code: Code, text: str) -> None:
    with pytest.raises(StatusError, match=text) as caught:
        read(message)
    assert caught.value.status.code == code


def test_options_of_another_kind_are_refused() -> None:
    message = request()
    message.compile_options.type_name = "xla::ifrt::XlaCompileOptions"
    with pytest.raises(StatusError, match="needs compile options of kind xla::ifrt::IfrtIRCompileOptions"):
        read(message)


@pytest.mark.parametrize(("options", "text"), [
    ({"executable_build_options": {"num_partitions": 3}}, "f_mesh_a are for 1 replicas of 3 partitions, but its mesh"),
    (
        {
            "executable_build_options": {"num_partitions": 2},
            "env_option_overrides": {CALLBACKS_OPTION: {"string_field": "1+1"}},
        },
        "f_mesh_a calls its client",
    ),
])  # fmt: skip
def test_options_that_do_not_fit_the_fragment_are_refused(options: Any, text: str) -> None:
    message = request(options={"f_mesh_a": compile_pb2.CompileOptions(**options)})
    with pytest.raises(StatusError, match=text):
        read(message).fragment_job(FRAGMENT)
