"""Requests that move arrays between the client's memory and devices, using programs of one host transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from atoll.decodable import decodable
from atoll.errors import Code, StatusError, invalid, unimplemented
from atoll.ifrt.host_buffer_store import MAX_STORED_BYTES, Stored
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.ir.program import DeviceToHost, HostBuffer, HostToDevice, single
from atoll.ir.types import ArraySpec, Shape, contents_nbytes
from atoll.protocol import messages as m
from atoll.protocol.ifrt import values_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.array_specs import layout_from, spec_from
from atoll.protocol.translation.shardings import sharding_from
from atoll.quantities import counted
from atoll.session.downloads import Download


class _Source(NamedTuple):
    """A host buffer of the client, and the shards that it holds."""

    handle: int
    shape: Shape
    strides: tuple[int, ...] | None
    positions: tuple[int, ...] | None  # of the shards; None for the whole array


def _make_array(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = [request.array] if request.HasField("array") else []
    try:
        shape = codec.shape_from(request.shape)
        layout = layout_from(request.layout) if request.HasField("layout") else None
        sharding = sharding_from(request.sharding, shape)
        spec = ArraySpec(codec.dtype_from(request.dtype), shape, sharding, layout)
        handles = session.handles(given, 1)
        source = _Source(request.host_buffer, shape, codec.strides_from(request), None)
        _put(pending, spec, handles[0], [source])
    except StatusError as error:
        pending.set_error(given, error)
        session.buffers.consume(request.host_buffer, _drop)
        raise
    session.define(handles, [spec], pending.context)
    session.arrays.records[handles[0]].ready = True  # data from the client fails with the request, or not at all
    pending.reply_arrays("make_array_from_host_buffer", handles, one=True)


def _make_arrays(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = list(request.arrays)
    try:
        specs = [spec_from(each.array_spec) for each in request.specs]
        sources = [_sources(each) for each in request.specs]
        handles = session.handles(given, len(specs))
        if len(specs) > 1:  # check all before launching the first, so that the request succeeds or fails as a whole
            for spec, buffers in zip(specs, sources, strict=True):
                _hosts(session, spec, buffers)
            for spec, buffers in zip(specs, sources, strict=True):
                _program(session, spec, buffers)
        for spec, handle, buffers in zip(specs, handles, sources, strict=True):
            _put(pending, spec, handle, buffers)
    except StatusError as error:
        pending.set_error(given, error)
        for each in request.specs:
            for buffer in each.host_buffers:
                session.buffers.consume(buffer.host_buffer, _drop)
        raise
    session.define(handles, specs, pending.context)
    pending.reply_arrays("make_arrays_from_host_buffer_shards", handles)


def _sources(spec: Any) -> list[_Source]:
    if len(spec.addressable_shard_indices) != len(spec.host_buffers):
        raise invalid("there must be as many host buffers as lists of shards")
    return [
        _Source(buffer.host_buffer, codec.shape_from(buffer.shape), codec.strides_from(buffer), tuple(indices.indices))
        for indices, buffer in zip(spec.addressable_shard_indices, spec.host_buffers, strict=True)
    ]


def _put(pending: PendingRequest, spec: ArraySpec, handle: int, sources: Sequence[_Source]) -> None:
    """Launch the transfer, with a single small buffer. Other buffers are sent to the hosts when they arrive."""
    session = pending.session
    hosts = _hosts(session, spec, sources)
    program = _program(session, spec, sources)
    if len(sources) == 1 and spec.dtype != "string":
        small = session.buffers.take_small(sources[0].handle, session.cluster.welcome.most_carried)
        if small is not None:
            session.launch_with_contents(program, (handle,), b"".join(small.contents), pending.context)
            return
    feeds = [session.cluster.feed() for _ in sources]
    for source, feed, takers in zip(sources, feeds, hosts, strict=True):
        session.buffers.consume(source.handle, _uploader(session, feed, takers, spec.dtype, feeds[0]))
    session.launch(program, (), (handle,), feeds, pending.context)


def _hosts(session: IfrtSession, spec: ArraySpec, sources: Sequence[_Source]) -> list[list[int]]:
    """Return the hosts that take each buffer. Raise StatusError if the array cannot be made from data."""
    if spec.dtype in ("token", "opaque"):
        raise unimplemented(f"arrays of dtype {spec.dtype} cannot be made from data")
    session.cluster.hosts_of(spec.sharding.devices)
    return [_takers(session, spec, source) for source in sources]


def _program(session: IfrtSession, spec: ArraySpec, sources: Sequence[_Source]) -> int:
    """Return the program of the transfer. Raise INVALID_ARGUMENT if it is not valid."""
    node = HostToDevice(tuple(HostBuffer(i, s.shape, s.strides, s.positions) for i, s in enumerate(sources)), (spec,))
    return session.cluster.programs.number(
        ("put", node), lambda: single("device_put", (), node, feeds=len(node.buffers))
    )


def _takers(session: IfrtSession, spec: ArraySpec, source: _Source) -> list[int]:
    """Return the hosts that have shards of the buffer, because a host that has none would keep it forever.

    Raise INVALID_ARGUMENT if the array has no such shards.
    """
    devices = spec.sharding.devices
    if source.positions is None:
        return session.cluster.hosts_of(devices)
    if not all(0 <= position < len(devices) for position in source.positions):
        raise invalid(f"an array on {counted(len(devices), 'device')} has no shards at {source.positions[:8]}")
    return session.cluster.hosts_of([devices[position] for position in source.positions])


def _uploader(
    session: IfrtSession, feed: int, hosts: Sequence[int], dtype: str, launch: int
) -> Callable[[Stored], None]:
    def upload(stored: Stored) -> None:
        if stored.descriptor >= 0:
            session.cluster.upload_file(hosts, feed, stored.nbytes, stored.descriptor, launch)
            return
        contents = stored.contents
        if dtype == "string":
            data = b"".join(bytes(part) for part in contents)
            texts = codec.parse(values_pb2.StringArrayContents, data)
            contents = [msgspec.msgpack.encode(list(texts.strings))]
        session.cluster.upload(hosts, feed, contents, launch)

    return upload


def _drop(stored: Stored) -> None:
    stored.drop()


def _copy_to_host_buffer(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    spec = session.arrays.spec(request.array)
    strides = codec.strides_from(request)
    if strides is not None:
        _check_strides(spec, strides)
    node = DeviceToHost((0,), 0, strides)
    program = session.cluster.programs.number(
        ("get", spec, node), lambda: single("copy to host", (spec,), node, feeds=1)
    )

    def answer(download: Download) -> None:
        session.buffers.put(request.host_buffer, download)
        response = pending.response()
        response.copy_to_host_buffer.SetInParent()
        pending.reply(response)

    def started(download: Download) -> None:
        try:
            download.status.raise_if_error()
            answer(download)
        except StatusError as error:  # the download has failed, or the session holds too many bytes
            pending.fail(error.status)

    cluster = session.cluster
    # If the array is ready, only the read itself can fail, so the client can fetch contents while they arrive.
    is_ready = session.arrays.get(request.array).ready
    download = Download(
        cluster.number(),
        spec.sharding.devices,
        contents_nbytes(spec),
        cluster.make_future,
        None if is_ready else started,
        _texts_to_proto if spec.dtype == "string" else None,
    )
    if is_ready:
        answer(download)
    wait = cluster.expect(download)
    session.launch(program, (request.array,), (cluster.mint(),), (download.feed,), wait=wait)


def _texts_to_proto(content: Any) -> bytes:
    texts = msgspec.msgpack.decode(bytes(content), type=decodable(list[bytes]))
    return bytes(values_pb2.StringArrayContents(strings=texts).SerializeToString())


def _check_strides(spec: ArraySpec, strides: tuple[int, ...]) -> None:
    """Raise INVALID_ARGUMENT if the array's contents cannot have these strides."""
    if len(strides) != len(spec.shape):
        raise invalid(f"{len(strides)} byte strides for an array of {counted(len(spec.shape), 'dimension')}")
    reach = sum(abs(stride) * max(0, size - 1) for stride, size in zip(strides, spec.shape, strict=True))
    if reach > MAX_STORED_BYTES:
        raise invalid(f"the byte strides extend over {reach} bytes, and the limit is {MAX_STORED_BYTES}")


def _make_error_arrays(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    specs = [spec_from(each) for each in request.specs]
    handles = session.handles(list(request.arrays), len(specs))
    error = codec.status_from(request.error)
    if not Code.OK < error.code <= max(Code):
        raise invalid(f"{error.code} is not the code of an error")
    session.cluster.send(m.MakeError(tuple(handles), error))
    session.define(handles, specs, pending.context)
    pending.reply_arrays("make_error_arrays", handles)


HANDLERS: dict[str, Handler] = {
    "make_array_from_host_buffer": _make_array,
    "make_arrays_from_host_buffer_shards": _make_arrays,
    "copy_to_host_buffer": _copy_to_host_buffer,
    "make_error_arrays": _make_error_arrays,
}
