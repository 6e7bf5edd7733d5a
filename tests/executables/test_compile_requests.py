"""Tests of clients' compilation requests."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from atoll.errors import Code, StatusError
from atoll.executables.compile_requests import compile_job, default_assignment
from atoll.protocol.callbacks import CALLBACKS_OPTION, CHANNELS_OPTION, COMPILE_CALLS_OPTION, PROGRAM_OPTION
from atoll.protocol.ifrt import compile_pb2
from atoll.protocol.messages import FunctionSource, HostChannels
from tests.protocol.translation.wire import compile_request


def assignment(rows: list[list[int]], replicas: int, partitions: int) -> Any:
    return {
        "replica_count": replicas,
        "computation_count": partitions,
        "computation_devices": [{"replica_device_ids": row} for row in rows],
    }


def test_a_compile_request_names_its_devices_by_replica_and_partition():
    request = compile_request(
        num_replicas=2, num_partitions=3, device_assignment=assignment([[0, 1], [2, 3], [4, 5]], 2, 3)
    )
    assert compile_job(request, 8).assignment == ((0, 2, 4), (1, 3, 5))
    assert default_assignment(2, 2, 8) == ((0, 1), (2, 3))


def test_the_same_program_on_other_devices_has_the_same_content():
    requests = [
        compile_request(num_partitions=2, device_assignment=assignment(rows, 1, 2)) for rows in ([[0], [1]], [[3], [2]])
    ]
    jobs = [compile_job(request, 8) for request in requests]
    assert jobs[0].content == jobs[1].content
    assert [job.devices for job in jobs] == [(0, 1), (3, 2)]
    other = compile_request(num_partitions=2)
    other.program.data = b"another"
    assert compile_job(other, 8).content != jobs[0].content


def test_a_program_among_the_options_is_the_one_that_is_compiled():
    carrying, plain = compile_request(), compile_request()
    options = compile_pb2.XlaCompileOptions.FromString(carrying.compile_options.data)
    options.compile_options.env_option_overrides[PROGRAM_OPTION].string_field = base64.b64encode(b"younger").decode()
    carrying.compile_options.data = options.SerializeToString()
    plain.program.data = b"younger"
    assert compile_job(carrying, 8).content == compile_job(plain, 8).content
    options.compile_options.env_option_overrides[PROGRAM_OPTION].string_field = "no base64"
    carrying.compile_options.data = options.SerializeToString()
    with pytest.raises(StatusError, match=PROGRAM_OPTION):
        compile_job(carrying, 8)


@pytest.mark.parametrize(
    "request_",
    [
        compile_request(num_partitions=9),
        compile_request(num_replicas=1 << 40, num_partitions=1 << 40),
        compile_request(num_partitions=2, device_assignment=assignment([[0]], 1, 1)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], [0]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], [8]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], [-1]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0]], 1, 2)),
        compile_request(num_partitions=2, device_assignment=assignment([[0], []], 1, 2)),
        compile_request(device_assignment=assignment([], (1 << 31) - 1, 0)),
        compile_request(device_assignment=assignment([], 0, 0)),
    ],
)
def test_a_compile_request_for_devices_that_do_not_fit_is_refused(request_):
    with pytest.raises(StatusError) as caught:
        compile_job(request_, 8)
    assert caught.value.status.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"type_name": "xla::ifrt::PluginProgram", "data": b'{"x": 1}'}, Code.INVALID_ARGUMENT, "plugin program"),
        ({"type_name": "xla::ifrt::PluginProgram", "data": b"\xff\xfe"}, Code.INVALID_ARGUMENT, "plugin program"),
        ({"type_name": "xla::ifrt::Other"}, Code.UNIMPLEMENTED, "xla::ifrt::Other"),
    ],
)  # fmt: skip
def test_programs_of_other_kinds_are_refused(change, code, text):
    request = compile_request()
    for name, value in change.items():
        setattr(request.program, name, value)
    with pytest.raises(StatusError, match=text) as caught:
        compile_job(request, 8)
    assert caught.value.status.code == code


def calling_back(numbers: str | None, while_compiling: str = "", channels: str = "") -> Any:
    request = compile_request()
    options = compile_pb2.XlaCompileOptions.FromString(request.compile_options.data)
    overrides = options.compile_options.env_option_overrides
    if numbers is not None:
        overrides[CALLBACKS_OPTION].string_field = numbers
    if while_compiling:
        overrides[COMPILE_CALLS_OPTION].string_field = while_compiling
    if channels:
        overrides[CHANNELS_OPTION].string_field = channels
    request.compile_options.data = options.SerializeToString()
    return request


def test_a_program_with_callbacks_is_its_sessions_alone():
    job = compile_job(calling_back("12+3"), 8, session=5)
    assert job.callbacks == (12, 13, 14)
    source = msgspec.msgpack.decode(job.source, type=FunctionSource)
    assert (source.session, source.callbacks) == (5, (12, 13, 14))
    assert CALLBACKS_OPTION.encode() not in source.options
    assert compile_job(calling_back("12+3"), 8, session=6).content != job.content
    assert compile_job(compile_request(), 8, session=5).content == compile_job(compile_request(), 8, session=6).content


@pytest.mark.parametrize("numbers", ["", "1", "1+0", "+1", "-1+1", "1+-1", "1+65537", "1" * 16 + "+1", "1+1+1", "a+b"])
def test_numbers_of_callbacks_that_are_none_are_refused(numbers: str):
    with pytest.raises(StatusError, match="invalid numbers of callbacks"):
        compile_job(calling_back(numbers), 8)


def test_what_is_called_while_a_program_is_compiled_comes_last_with_its_keys():
    job = compile_job(calling_back("12+2", "20:00ff,61"), 8, session=5)
    assert job.callbacks == (12, 13, 20, 21)
    source = msgspec.msgpack.decode(job.source, type=FunctionSource)
    assert (source.session, source.callbacks, source.keys) == (5, job.callbacks, (b"\0\xff", b"a"))
    assert COMPILE_CALLS_OPTION.encode() not in source.options
    alone = msgspec.msgpack.decode(compile_job(calling_back(None, "20:61"), 8, session=5).source, type=FunctionSource)
    assert (alone.session, alone.callbacks, alone.keys) == (5, (20,), (b"a",))


@pytest.mark.parametrize("text", ["20", "x:61", "-1:61", "1:6", "1:61,61", "1:61;62", "1" * 16 + ":61"])
def test_keys_of_callbacks_that_are_none_are_refused(text: str):
    with pytest.raises(StatusError, match="invalid keys of callbacks"):
        compile_job(calling_back(None, text), 8)


def test_the_channels_of_callbacks_on_tpus_are_part_of_the_source():
    job = compile_job(calling_back("12+2", "20:61", "[[[1,2],[3]],[[4],[]]]"), 8, session=5)
    source = msgspec.msgpack.decode(job.source, type=FunctionSource)
    assert source.channels == (HostChannels((1, 2), (3,)), HostChannels((4,), ()))
    assert CHANNELS_OPTION.encode() not in source.options


@pytest.mark.parametrize(
    "text",
    ["{}", "[[[1],[2]]]", "[[[1],[2]],[[],[3]]]", "[[[1],[2]],[[2],[3]]]", '[[["a"],[2]],[[4],[3]]]', "[" * 5000],
)
def test_channels_that_are_none_of_these_callbacks_are_refused(text: str):
    with pytest.raises(StatusError, match="invalid channels of 2 callbacks"):
        compile_job(calling_back("12+2", "", text), 8)
