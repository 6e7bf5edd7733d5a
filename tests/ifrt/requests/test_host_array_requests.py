"""Tests of copies from and to the client's memory: launches, uploads and stored buffers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.errors import OK, Code, Status, StatusError
from atoll.ifrt.host_buffer_store import StoredUpload
from atoll.ir.program import DeviceToHost, HostBuffer, HostToDevice
from atoll.protocol import messages as m
from atoll.protocol.ifrt import arrays_pb2, values_pb2
from atoll.protocol.translation.codec import dtype_to
from atoll.protocol.translation.shardings import sharding_to
from tests.ifrt.rig import STACK, Rig, check_refused, node_of, on, program_of, spec_proto

SPEC = on(0, 2)
FAILURE = Status(int(Code.DATA_LOSS), "it burnt")


def put_fields(spec=SPEC, **changes: Any) -> dict[str, Any]:
    fields = {
        "dtype": dtype_to(spec.dtype),
        "shape": {"dims": spec.shape},
        "sharding": sharding_to(spec.sharding, spec.shape, None),
        "host_buffer": 3,
        "array": 5,
    }
    return fields | changes


def store(rig: Rig, handle: int, contents: bytes) -> None:
    rig.loop.call_soon(lambda: rig.session.buffers.put(handle, StoredUpload([contents], len(contents))))
    rig.settle()


# ---- to devices


@pytest.mark.parametrize("buffer_first", [True, False])
def test_a_buffer_goes_to_the_hosts_of_its_array_whichever_comes_first(rig: Rig, buffer_first):
    if buffer_first:
        store(rig, 3, b"0123456789abcdef")
    response = rig.ask("make_array_from_host_buffer", **put_fields())
    if not buffer_first:
        assert rig.cluster.uploads == []
        store(rig, 3, b"0123456789abcdef")
    assert response.make_array_from_host_buffer.array == 5
    program, launch = rig.take_launch()
    assert node_of(program) == HostToDevice((HostBuffer(0, (4,), None, None),), (SPEC,))
    assert (launch.arguments, launch.results, launch.traceback_id) == ((), (5,), STACK)
    assert rig.cluster.uploads == [((0, 1), launch.feeds[0], b"0123456789abcdef")]
    assert rig.session.arrays.get(5).ready  # it can only fail with its request
    assert rig.session.buffers.nbytes == 0


@pytest.mark.parametrize(("limit", "carries"), [(15, False), (16, True)])
def test_a_small_buffer_that_has_arrived_is_part_of_the_launch(rig: Rig, limit: int, carries: bool) -> None:
    rig.cluster.session.welcome = msgspec.structs.replace(rig.cluster.session.welcome, most_carried=limit)
    store(rig, 3, b"0123456789abcdef")
    rig.ask("make_array_from_host_buffer", **put_fields())
    _, launch = rig.take_launch()
    assert launch.contents == (b"0123456789abcdef" if carries else None)
    assert len(launch.feeds) == 1
    assert len(rig.cluster.uploads) == (not carries)
    assert rig.session.buffers.nbytes == 0


def test_buffers_of_shards_say_which_they_are(rig: Rig):
    spec = arrays_pb2.MakeArraysFromHostBufferShards.Spec(array_spec=spec_proto(SPEC))
    for position, buffer in ((1, 3), (0, 4)):
        spec.addressable_shard_indices.add(indices=[position])
        spec.host_buffers.add(dtype=dtype_to("float32"), shape={"dims": [2]}, host_buffer=buffer)
    store(rig, 3, b"second__")
    store(rig, 4, b"first___")
    response = rig.ask("make_arrays_from_host_buffer_shards", specs=[spec], arrays=[5])
    assert list(response.make_arrays_from_host_buffer_shards.arrays) == [5]
    program, launch = rig.take_launch()
    assert [buffer.positions for buffer in node_of(program).buffers] == [(1,), (0,)]
    assert rig.cluster.uploads == [  # each to the host with its shard, and not to other hosts, where it would remain
        ((1,), launch.feeds[0], b"second__"),
        ((0,), launch.feeds[1], b"first___"),
    ]


def test_texts_travel_as_a_list(rig: Rig):
    contents = values_pb2.StringArrayContents(strings=[b"one", b"two"]).SerializeToString()
    store(rig, 3, contents)
    rig.ask("make_array_from_host_buffer", **put_fields(on(0, shape=(2,), dtype="string")))
    ((_, _, uploaded),) = rig.cluster.uploads
    assert msgspec.msgpack.decode(uploaded) == [b"one", b"two"]


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"shape": {"dims": [-1]}}, Code.INVALID_ARGUMENT, "invalid shape"),
        ({"dtype": dtype_to("token")}, Code.UNIMPLEMENTED, "dtype token cannot be made"),
        (
            {"sharding": sharding_to(on(99).sharding, (4,), None)},
            Code.INVALID_ARGUMENT,
            "device 99 does not exist",
        ),
    ],
)
def test_an_array_that_cannot_be_is_refused_and_its_buffer_dropped(rig: Rig, changes, code, text):
    store(rig, 3, b"contents")
    check_refused(rig.ask("make_array_from_host_buffer", **put_fields(**changes)), code, text)
    assert (rig.take(), rig.cluster.uploads, rig.session.buffers.nbytes) == ([], [], 0)
    check_refused(rig.ask("is_array_deleted", array=5), code, text)


def test_of_several_arrays_none_is_made_where_one_cannot_be(rig: Rig):
    specs = [
        arrays_pb2.MakeArraysFromHostBufferShards.Spec(
            array_spec=spec_proto(each),
            addressable_shard_indices=[{"indices": [0]}],
            host_buffers=[{"dtype": dtype_to("float32"), "shape": {"dims": [4]}, "host_buffer": buffer}],
        )
        for each, buffer in ((on(0), 3), (on(99), 4))
    ]
    response = rig.ask("make_arrays_from_host_buffer_shards", specs=specs, arrays=[5, 6])
    check_refused(response, Code.INVALID_ARGUMENT, "device 99 does not exist")
    assert rig.take() == []


def test_as_many_buffers_as_shards_are_needed(rig: Rig):
    spec = arrays_pb2.MakeArraysFromHostBufferShards.Spec(array_spec=spec_proto(SPEC))
    spec.addressable_shard_indices.add(indices=[0])
    response = rig.ask("make_arrays_from_host_buffer_shards", specs=[spec], arrays=[5])
    check_refused(response, Code.INVALID_ARGUMENT, "as many host buffers as lists of shards")


# ---- from devices


def fetch(rig: Rig, **fields: Any) -> tuple[int, m.Launch]:
    """Return the number of a request that fetches array 1, and its launch."""
    op = rig.send("copy_to_host_buffer", array=1, host_buffer=3, **fields)
    registered, launch = rig.take()
    assert node_of(program_of(registered)[1]) == DeviceToHost((0,), 0, (8,) if fields else None)
    assert launch.wait
    return op, launch


def arrive(rig: Rig, feed: int, content: bytes, more: bool = False) -> None:
    rig.loop.call_soon(rig.cluster.on_feed, feed, content, more, lambda: None)
    rig.settle()


def read(rig: Rig, parts: int) -> bytes:
    async def read() -> bytes:
        stored = rig.session.buffers.read(3)
        return b"".join([bytes(await stored.part(i)) for i in range(parts)])

    return rig.loop.run_until_complete(read())


def test_contents_are_stored_before_the_client_is_answered(rig: Rig):
    rig.make(1, SPEC)
    op, launch = fetch(rig)
    assert launch.arguments == (1,)
    assert rig.answer(op) is None
    arrive(rig, launch.feeds[0], b"01234567", more=True)
    assert rig.answer(op).WhichOneof("kind") == "copy_to_host_buffer"
    arrive(rig, launch.feeds[0], b"89abcdef")
    rig.end_waits([launch])
    assert read(rig, 2) == b"0123456789abcdef"


def test_of_an_array_that_is_ready_the_client_may_come_for_the_contents_at_once(rig: Rig):
    rig.make(1, SPEC)
    rig.session.arrays.get(1).ready = True
    op, launch = fetch(rig)
    assert rig.answer(op).WhichOneof("kind") == "copy_to_host_buffer"
    arrive(rig, launch.feeds[0], b"0123456789abcdef")
    assert read(rig, 1) == b"0123456789abcdef"


def test_a_failed_computation_is_the_answer(rig: Rig):
    rig.make(1, SPEC)
    op, launch = fetch(rig)
    rig.end_waits([launch], FAILURE)
    check_refused(rig.answer(op), Code.DATA_LOSS, "it burnt")
    arrive(rig, launch.feeds[0], b"too late")
    with pytest.raises(StatusError, match="unknown host buffer"):
        rig.session.buffers.read(3)


def test_a_failure_after_the_answer_ends_the_buffer(rig: Rig):
    rig.make(1, SPEC)
    rig.session.arrays.get(1).ready = True
    _, launch = fetch(rig)
    rig.end_waits([launch], FAILURE)
    with pytest.raises(StatusError, match="it burnt"):
        read(rig, 1)


@pytest.mark.parametrize("ready", [False, True], ids=["before the answer", "after it"])
def test_contents_that_were_on_their_way_from_a_host_that_is_lost_fail(rig: Rig, ready: bool):
    rig.make(1, SPEC)
    rig.session.arrays.get(1).ready = ready
    op, launch = fetch(rig)
    rig.end_waits([launch])  # it has sent its shards
    if ready:
        arrive(rig, launch.feeds[0], b"01234567", more=True)
    rig.receive(m.HostsFailed((0,)))
    if ready:
        with pytest.raises(StatusError, match="host 0 is gone, and data that it had sent"):
            read(rig, 2)
    else:
        check_refused(rig.answer(op), Code.DATA_LOSS, "host 0 is gone, and data that it had sent")


def test_contents_that_arrive_after_the_client_has_deleted_the_buffer_leave_their_memory(rig: Rig):
    rig.make(1, SPEC)
    rig.session.arrays.get(1).ready = True
    _, launch = fetch(rig)
    rig.session.buffers.delete(3)
    released: list[str] = []
    rig.loop.call_soon(rig.cluster.on_feed, launch.feeds[0], b"01234567", True, lambda: released.append("first"))
    rig.loop.call_soon(rig.cluster.on_feed, launch.feeds[0], b"89abcdef", False, lambda: released.append("last"))
    rig.settle()
    assert released == ["first", "last"]


def test_texts_come_back_as_the_client_knows_them(rig: Rig):
    rig.make(1, on(0, shape=(2,), dtype="string"))
    _, launch = fetch(rig)
    arrive(rig, launch.feeds[0], msgspec.msgpack.encode([b"one", b"two"]))
    assert list(values_pb2.StringArrayContents.FromString(read(rig, 1)).strings) == [b"one", b"two"]


def test_contents_are_laid_out_as_the_client_asks(rig: Rig):
    rig.make(1, SPEC)
    fetch(rig, byte_strides={"strides": [8]})


@pytest.mark.parametrize(
    ("strides", "text"), [([4, 4], "2 byte strides for an array of 1"), ([1 << 60], "extend over")]
)
def test_strides_that_make_no_sense_are_refused(rig: Rig, strides, text):
    rig.make(1, SPEC)
    response = rig.ask("copy_to_host_buffer", array=1, host_buffer=3, byte_strides={"strides": strides})
    check_refused(response, Code.INVALID_ARGUMENT, text)
    assert rig.take() == []


# ---- errors as arrays


def test_arrays_may_stand_for_an_error(rig: Rig):
    error = {"code": int(Code.DATA_LOSS), "message": "it burnt"}
    response = rig.ask("make_error_arrays", error=error, specs=[spec_proto(SPEC)], arrays=[5])
    assert list(response.make_error_arrays.arrays) == [5]
    assert rig.take() == [m.MakeError((5,), FAILURE)]
    assert rig.session.arrays.spec(5) == SPEC


@pytest.mark.parametrize("code", [int(OK.code), 99])
def test_an_error_needs_an_errors_code(rig: Rig, code):
    response = rig.ask("make_error_arrays", error={"code": code}, specs=[spec_proto(SPEC)], arrays=[5])
    check_refused(response, Code.INVALID_ARGUMENT, f"{code} is not the code of an error")
    assert rig.take() == []
