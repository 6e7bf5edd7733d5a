"""Slices: executables that stand for devices."""

from __future__ import annotations

import json

import msgspec
import pytest

from atoll.cluster.slice_requests import MAGIC, SliceRequest
from atoll.errors import OK, Code, Status
from atoll.protocol import messages as m
from tests.ifrt.rig import Rig, check_refused
from tests.protocol.translation.wire import compile_request

FAILURE = Status(int(Code.RESOURCE_EXHAUSTED), "no such devices")


def request_of(payload: bytes):
    request = compile_request()
    request.program.type_name = "xla::ifrt::PluginProgram"
    request.program.data = b"__serialized_plugin_program " + MAGIC + payload
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
    check_refused(rig.ask("compile", request_of(payload)), Code.INVALID_ARGUMENT, "no request for a slice")
    assert (rig.take(), rig.paused) == ([], False)


def test_a_slice_cannot_be_run(rig: Rig):
    op, asked = asked_for(rig)
    rig.receive(m.SliceAdded(asked.request, OK, 6, (2, 3), (2,)))
    handle = rig.answer(op).compile.executable
    check_refused(rig.ask("execute", executable=handle, results=[5]), Code.INVALID_ARGUMENT, "cannot be run")
