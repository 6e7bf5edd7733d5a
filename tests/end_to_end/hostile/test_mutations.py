"""Tests of valid requests with random changes: each gets a reply, or ends only its own session."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.protocol.ifrt import arrays_pb2, executables_pb2, session_pb2
from tests.end_to_end.hostile.hostile_requests import (
    HUGE,
    REFUSED,
    asking,
    assemble,
    assignment,
    compile_request,
    copies,
    error_arrays,
    makes,
    preparation,
    program,
    remap,
    reshard,
    shards,
    spec,
    tiled,
)
from tests.end_to_end.raw_client import RawClient, on_device
from tests.thoroughness import examples


@functools.cache
def recorded() -> list[bytes]:
    """Return one valid request of each kind that changes state, for the session of the fixture `client`."""
    requests = [
        makes(20, buffer=50)[0],
        shards(21, [[0], [1]])[0],
        copies([1], [1], [22])[0],
        reshard([3], [spec(on_device(2))], [23])[0],
        remap((0, 0, 0, 1, 1, 0, 1, 1), (1, 0, 0, 1, 1, 1, 2, 1), results=(24,))[0],
        assemble([1, 2], 25, tiled([0, 1], [2]))[0],
        error_arrays(3, [26])[0],
        asking("copy_to_host_buffer", arrays_pb2.CopyToHostBuffer(array=3, host_buffer=61)),
        asking(
            "disassemble_into_single_device_arrays",
            arrays_pb2.DisassembleIntoSingleDeviceArrays(array=3, results=[27, 28]),
        ),
        asking("delete_array", arrays_pb2.DeleteArray(arrays=[2])),
        asking("destruct_array", arrays_pb2.DestructArray(arrays=[2])),
        asking("compile", compile_request(program(), assignment(1, 1, [[0]]))),
        asking("execute", executables_pb2.Execute(executable=HUGE, arguments=[1], results=[29])),
    ]
    for number, request in enumerate(requests):
        request.meta.op_id = 1000 + number
    assert len(requests) == RECORDED
    return [request.SerializeToString() for request in requests]


RECORDED = 13


def mutated(data: bytes, seed: int, times: int) -> bytes:
    """Return `data` with some bytes changed, removed, duplicated, or cut off."""
    chance = random.Random(seed)
    out = bytearray(data)
    for _ in range(times):
        if not out:
            break
        position = chance.randrange(len(out))
        match chance.randrange(6):
            case 0:
                out[position] = chance.randrange(256)
            case 1:
                out[position] ^= 1 << chance.randrange(8)
            case 2:
                out[position] = chance.choice((0x00, 0x7F, 0x80, 0xFF))
            case 3:
                del out[position]
            case 4:
                out[position:position] = out[position : position + chance.randrange(1, 12)]
            case _:
                del out[chance.randrange(len(out)) + 1 :]
    return bytes(out)


EXTREMES = (0, 1, 2, 3, -1, -4, 7, 255, 1 << 20, 1 << 31, (1 << 31) - 1, -(1 << 31), 1 << 40, HUGE, (1 << 63) - 1)


def twisted(data: bytes, seed: int, times: int) -> bytes:
    """Return a valid message in which the values of some fields were changed, removed or duplicated.

    It is well-formed.
    """
    chance = random.Random(seed)
    request = session_pb2.Request.FromString(data)
    for _ in range(times):
        message: Any = request
        while True:
            fields = [each for each in message.DESCRIPTOR.fields if each.number != 1 or message is not request]
            given = [field for field, _ in message.ListFields() if field in fields]
            if not fields:
                break
            field = chance.choice(given or fields)
            value = getattr(message, field.name)
            repeated = field.is_repeated
            if repeated and len(value) and chance.random() < 0.3:
                if chance.random() < 0.5:
                    del value[chance.randrange(len(value))]
                else:
                    value.extend(list(value)[:1])
                break
            if field.message_type is None:
                _twist(message, field, value, chance)
                break
            if field.message_type.GetOptions().map_entry or (repeated and not len(value)):
                break
            if chance.random() < 0.1:
                message.ClearField(field.name)
                break
            message = value[chance.randrange(len(value))] if repeated else value
    return bytes(request.SerializeToString())


def _twist(message: Any, field: Any, value: Any, chance: random.Random) -> None:
    kind = field.cpp_type
    new: Any
    if kind == field.CPPTYPE_STRING:
        old = value[0] if field.is_repeated and len(value) else b"" if field.is_repeated else value
        if isinstance(old, str):
            new = chance.choice(("", "x", "xla::ifrt::SingleDeviceSharding", "xla::ifrt::HloSharding", "device"))
        else:
            new = mutated(bytes(old), chance.randrange(1 << 32), 2)
    elif kind == field.CPPTYPE_BOOL:
        new = True
    elif kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        new = chance.choice((0.0, float("inf"), -1.0))
    else:
        new = chance.choice(EXTREMES)
    with contextlib.suppress(ValueError, TypeError):  # the field does not accept such a value
        if not field.is_repeated:
            setattr(message, field.name, new)
        elif len(value):
            value[chance.randrange(len(value))] = new
        else:
            value.append(new)


@pytest.mark.parametrize("change", [mutated, twisted])
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    picks=st.lists(
        st.tuples(st.integers(0, RECORDED - 1), st.integers(0, 2**32 - 1), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    )
)
def test_a_mutated_request_is_answered_or_ends_its_session(
    address: str, change: Callable[[bytes, int, int], bytes], picks: list[Any]
) -> None:
    with contextlib.closing(RawClient(address)) as client:
        client.open()
        for request in preparation():
            client.store(request.make_array_from_host_buffer.host_buffer, bytes(16))
            client.status(lambda into, request=request: into.MergeFrom(request))
        client.store(50, bytes(16))
        for which, seed, times in picks:
            client.send(change(recorded()[which], seed, times))
        # Either the session answers the next request, or it has ended with a status.
        code, text = client.status(lambda into: setattr(into.is_array_deleted, "array", 1))
        assert code in (0, *REFUSED), text
