"""Questions about the session itself: its devices, futures, readiness, defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import OK, Status
from atoll.frontends.ifrt import codec
from atoll.frontends.ifrt.devices import init_reply
from atoll.frontends.ifrt.executables import default_assignment
from atoll.frontends.ifrt.session import Exchange, Handler
from atoll.protocol.ifrt import values_pb2


def _init(exchange: Exchange, request: Any) -> None:
    response = exchange.response()
    session = exchange.session
    response.init.CopyFrom(init_reply(session.link.welcome, session.number))
    exchange.reply(response)


def _check_future(exchange: Exchange, request: Any) -> None:
    exchange.outcome("check_future", request.future)


def _check_value_ready(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    handles = list(request.values)
    records = [session.arrays.get(handle) for handle in handles]

    def ready(status: Status) -> None:
        if not status.ok:
            exchange.fail(status)
            return
        for record in records:
            record.ready = True
        response = exchange.response()
        response.check_value_ready.SetInParent()
        exchange.reply(response)

    if handles:
        session.link.wait(handles, ready)
    else:
        ready(OK)


def _get_default_device_assignment(exchange: Exchange, request: Any) -> None:
    devices = len(exchange.session.link.welcome.devices)
    rows = default_assignment(request.num_replicas, request.num_partitions, devices)
    response = exchange.response()
    proto = response.get_default_device_assignment.device_assignment
    proto.replica_count, proto.computation_count = len(rows), len(rows[0])
    for partition in range(len(rows[0])):
        proto.computation_devices.add(replica_device_ids=[row[partition] for row in rows])
    exchange.reply(response)


def _get_default_layout(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    dtype, dims, device = codec.dtype_from(request.dtype), tuple(request.dims), request.device_id
    codec.shape_from(values_pb2.Shape(dims=dims))
    session.link.hosts_of([device])
    info = session.link.welcome.devices[device].info
    key = (dtype, dims, info.kind, request.memory_kind)

    async def work() -> Any:
        if key not in session.layouts:
            payload = msgspec.msgpack.encode((dtype, dims, info.ordinal))
            session.layouts[key] = await session.link.inquire("layout", device, payload=payload)
        response = exchange.response()
        response.get_default_layout.serialized_pjrt_layout = session.layouts[key]
        return response

    exchange.later(work())


HANDLERS: dict[str, Handler] = {
    "init": _init,
    "check_future": _check_future,
    "check_value_ready": _check_value_ready,
    "get_default_device_assignment": _get_default_device_assignment,
    "get_default_layout": _get_default_layout,
}
