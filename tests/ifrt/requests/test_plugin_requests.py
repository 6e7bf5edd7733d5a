"""Tests of requests by Atoll's plug-in: queries and slices."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atoll.cluster.slice_requests import MAGIC as SLICE
from atoll.cluster.slice_requests import SliceRequest
from atoll.errors import OK, Code, Status
from atoll.ir.program import DeviceToHost
from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled
from atoll.protocol import messages as m
from atoll.protocol.questions import (
    MAGIC,
    MAX_CONTENTS,
    CompiledSource,
    ContentsQuestion,
    MemoryQuestion,
    Question,
    SourceQuestion,
    write_question,
)
from tests.ifrt.requests.test_executable_requests import compiled
from tests.ifrt.rig import Rig, check_refused, on, program_of
from tests.protocol.translation.wire import compile_request

LOST = Status(int(Code.DATA_LOSS), "host 0 is gone")


def plugin_request(payload: bytes) -> Any:
    request = compile_request()
    request.program.type_name = "xla::ifrt::PluginProgram"
    request.program.data = b"__serialized_plugin_program " + payload
    return request


def ask(rig: Rig, question: Question) -> int:
    return rig.send("compile", plugin_request(write_question(question)))


def test_a_devices_memory_is_a_workers_to_say(rig: Rig):
    op = ask(rig, MemoryQuestion(1))
    (query,) = rig.take()
    assert (query.what, query.device) == ("memory", 1)
    rig.receive(m.QueryReply(query.query, OK, b'{"bytes_in_use":7}'))
    assert rig.answer(op).compile.fingerprint_value == b'{"bytes_in_use":7}'


def test_a_worker_that_is_lost_fails_the_question(rig: Rig):
    op = ask(rig, MemoryQuestion(0))
    (query,) = rig.take()
    rig.receive(m.QueryReply(query.query, LOST, b""))
    check_refused(rig.answer(op), Code.DATA_LOSS, "host 0 is gone")


TOGETHER = (DeviceToHost((0, 1), 0, None),)
APART = (DeviceToHost((0,), 0, None), DeviceToHost((1,), 1, None))


@pytest.mark.parametrize(
    ("second", "nodes", "parts"),
    [(on(0, dtype="int8"), TOGETHER, [b"a" * 16 + b"b" * 4]), (on(2, dtype="int8"), APART, [b"a" * 16, b"b" * 4])],
    ids=["on one host", "on two hosts"],
)
def test_one_launch_reads_all_staged_arrays(
    rig: Rig, second: ArraySpec, nodes: tuple[DeviceToHost, ...], parts: list[bytes]
) -> None:
    arrays = [rig.make(1, on(0)), rig.make(2, second)]
    rig.take()
    rig.session.staged.extend(arrays)
    op = ask(rig, ContentsQuestion(2))
    sent = rig.take()
    program = next(program_of(each)[1] for each in sent if isinstance(each, m.RegisterProgram))
    (launch,) = [each for each in sent if isinstance(each, m.Launch)]
    assert program.nodes == nodes
    assert (launch.arguments, rig.session.staged) == ((1, 2), [])
    for feed, contents in zip(launch.feeds, parts, strict=True):
        assert rig.answer(op) is None
        rig.session.cluster.downloads.take(feed, contents, False, lambda: None)
    rig.settle()
    assert rig.answer(op).compile.fingerprint_value == b"a" * 16 + b"b" * 4


def test_one_launch_reads_the_shards_of_all_staged_arrays(rig: Rig) -> None:
    divided = ArraySpec("int8", (2, 4), Sharding((0, 2), Tiled((1, 2), (0, 1))))
    arrays = [rig.make(1, divided), rig.make(2, on(2, dtype="int8"))]
    rig.take()
    rig.session.staged.extend(arrays)
    op = ask(rig, ContentsQuestion(2))
    sent = rig.take()
    program = next(program_of(each)[1] for each in sent if isinstance(each, m.RegisterProgram))
    (launch,) = [each for each in sent if isinstance(each, m.Launch)]
    assert program.nodes == (
        DeviceToHost((0,), 0, None, (), (0,)),
        DeviceToHost((0, 1), 1, None, (), (1, 0)),
    )
    for feed, contents in zip(launch.feeds, [b"abef", b"cdgh1234"], strict=True):
        rig.session.cluster.downloads.take(feed, contents, False, lambda: None)
    rig.settle()
    assert rig.answer(op).compile.fingerprint_value == b"abcdefgh1234"


def test_a_shard_whose_host_is_gone_fails_the_read(rig: Rig) -> None:
    rig.session.staged.append(rig.make(1, ArraySpec("int8", (4,), Sharding((0, 2), Tiled((2,), (0, 1))))))
    rig.take()
    op = ask(rig, ContentsQuestion(1))
    sent = rig.take()
    (launch,) = [each for each in sent if isinstance(each, m.Launch)]
    rig.session.cluster.downloads.take(launch.feeds[0], b"ab", False, lambda: None)
    rig.end_waits(sent, LOST)
    check_refused(rig.answer(op), Code.DATA_LOSS, "host 0 is gone")
    assert not rig.session.cluster.downloads.any()


def test_the_contents_of_an_array_whose_host_is_gone_fail(rig: Rig) -> None:
    rig.session.staged.append(rig.make(1, on(0)))
    rig.take()
    op = ask(rig, ContentsQuestion(1))
    rig.end_waits(rig.take(), LOST)
    check_refused(rig.answer(op), Code.DATA_LOSS, "host 0 is gone")


@pytest.mark.parametrize(
    ("spec", "count", "code", "text"),
    [
        (on(0), 2, Code.INVALID_ARGUMENT, "contents of 2 arrays, but 1 are staged"),
        (on(0, shape=(MAX_CONTENTS,)), 1, Code.RESOURCE_EXHAUSTED, "too many for one answer"),
        (on(0, dtype="string"), 1, Code.INVALID_ARGUMENT, "no fixed size"),
    ],
)
def test_contents_that_cannot_be_one_answer_are_refused(
    rig: Rig, spec: ArraySpec, count: int, code: Code, text: str
) -> None:
    rig.session.staged.append(rig.make(1, spec))
    rig.take()
    check_refused(rig.answer(ask(rig, ContentsQuestion(count))), code, text)
    assert (rig.session.staged, rig.take()) == ([], [])


def test_the_copies_of_a_replicated_array_count_once_in_an_answer(rig: Rig) -> None:
    replicated = ArraySpec("int8", (MAX_CONTENTS,), Sharding((0, 1), Replicated()))
    rig.session.staged.append(rig.make(1, replicated))
    rig.take()
    op = ask(rig, ContentsQuestion(1))
    (launch,) = [each for each in rig.take() if isinstance(each, m.Launch)]
    rig.session.cluster.downloads.take(launch.feeds[0], bytes(MAX_CONTENTS), False, lambda: None)
    rig.settle()
    assert len(rig.answer(op).compile.fingerprint_value) == MAX_CONTENTS


def test_a_question_about_no_array_forgets_what_is_staged(rig: Rig) -> None:
    rig.session.staged.append(rig.make(1, on(0)))
    rig.take()
    assert rig.answer(ask(rig, ContentsQuestion(0))).compile.fingerprint_value == b""
    assert (rig.session.staged, rig.take()) == ([], [])


def test_an_executables_source_is_what_it_was_compiled_from(rig: Rig):
    handle, _ = compiled(rig)
    op = ask(rig, SourceQuestion(rig.session.executable(handle).fingerprint))
    reply = rig.answer(op).compile
    source = msgspec.msgpack.decode(reply.fingerprint_value, type=CompiledSource)
    assert (source.program, source.assignment) == (b"module", ((0,),))
    check_refused(rig.ask("execute", executable=reply.executable), Code.INVALID_ARGUMENT, "cannot be run")
    assert rig.take() == []


@pytest.mark.parametrize(
    ("payload", "code", "text"),
    [
        (write_question(MemoryQuestion(99)), Code.INVALID_ARGUMENT, "device 99 does not exist"),
        (write_question(SourceQuestion(b"stranger")), Code.NOT_FOUND, "no executable of this session"),
        (MAGIC + b"\xc1", Code.INVALID_ARGUMENT, "invalid question"),
        (
            MAGIC + msgspec.msgpack.encode({"type": "memory", "device": -1}),
            Code.INVALID_ARGUMENT,
            "invalid question",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(rig: Rig, payload: bytes, code: Code, text: str):
    op = rig.send("compile", plugin_request(payload))
    check_refused(rig.answer(op), code, text)


# ---- slices


FAILURE = Status(int(Code.RESOURCE_EXHAUSTED), "no such devices")


def request_of(payload: bytes):
    request = compile_request()
    request.program.type_name = "xla::ifrt::PluginProgram"
    request.program.data = b"__serialized_plugin_program " + SLICE + payload
    return request


def asked_for(rig: Rig) -> tuple[int, m.AddSlice]:
    op = rig.send("compile", request_of(msgspec.msgpack.encode(SliceRequest(2, (2,)))))
    (asked,) = rig.take()
    assert asked == m.AddSlice(asked.request, SliceRequest(2, (2,)))
    assert rig.paused  # some of its devices may be moving
    return op, asked


def test_a_slice_is_an_executable_that_names_its_devices(rig: Rig):
    op, asked = asked_for(rig)
    rig.receive(m.SliceAdded(asked.request, OK, 6, (2, 3), (2,), ((2, 1), (3, 1))))
    reply = rig.answer(op).compile
    assert (reply.name, list(reply.device_ids)) == ("slice 6", [2, 3])
    assert json.loads(reply.fingerprint_value) == {"slice": 6, "shape": [2], "island": 1}
    assert not rig.paused


def test_a_slice_ends_with_its_executable(rig: Rig):
    op, asked = asked_for(rig)
    rig.receive(m.SliceAdded(asked.request, OK, 6, (2, 3), (2,)))
    handle = rig.answer(op).compile.executable
    rig.ask("executable_destruct", executable=handle)
    assert rig.take() == [m.ReleaseSlice(6)]


def test_a_slice_that_there_is_not_is_an_error_and_the_client_goes_on(rig: Rig):
    op, asked = asked_for(rig)
    rig.receive(m.SliceAdded(asked.request, FAILURE))
    check_refused(rig.answer(op), Code.RESOURCE_EXHAUSTED, "no such devices")
    assert not rig.paused


@pytest.mark.parametrize("payload", [b"\xc1", msgspec.msgpack.encode({"count": 0})])
def test_what_is_no_request_is_refused(rig: Rig, payload):
    check_refused(rig.ask("compile", request_of(payload)), Code.INVALID_ARGUMENT, "invalid slice request")
    assert (rig.take(), rig.paused) == ([], False)


def test_a_slice_cannot_be_run(rig: Rig):
    op, asked = asked_for(rig)
    rig.receive(m.SliceAdded(asked.request, OK, 6, (2, 3), (2,)))
    handle = rig.answer(op).compile.executable
    check_refused(rig.ask("execute", executable=handle, results=[5]), Code.INVALID_ARGUMENT, "cannot be run")
