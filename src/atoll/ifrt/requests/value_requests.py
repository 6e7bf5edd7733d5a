"""Questions about the session itself: its devices, futures, readiness, defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import OK, Status, StatusError, unimplemented
from atoll.executables.compile_requests import default_assignment
from atoll.ifrt.ifrt_devices import init_reply
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.protocol.ifrt import values_pb2
from atoll.protocol.translation import codec


def _init(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    session = pending.session
    response.init.CopyFrom(init_reply(session.cluster.welcome, session.number))
    pending.reply_out_of_sequence(response)


def _check_future(pending: PendingRequest, request: Any) -> None:
    deleted = pending.session.deletions.pop(request.future, None)
    if deleted is None:
        pending.reply_outcome("check_future", request.future)
    elif deleted.ok:
        response = pending.response()
        response.check_future.SetInParent()
        pending.reply_out_of_sequence(response)
    else:
        pending.fail(deleted)


def _check_value_ready(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    handles = list(request.values)
    records = [session.arrays.get(handle) for handle in handles]

    def ready(status: Status) -> None:
        if not status.ok:
            pending.fail(status)
            return
        for record in records:
            record.ready = True
        response = pending.response()
        response.check_value_ready.SetInParent()
        pending.reply(response)

    if handles:
        session.cluster.wait(handles, ready)
    else:
        ready(OK)


def _get_default_device_assignment(pending: PendingRequest, request: Any) -> None:
    devices = len(pending.session.cluster.welcome.devices)
    rows = default_assignment(request.num_replicas, request.num_partitions, devices)
    response = pending.response()
    proto = response.get_default_device_assignment.device_assignment
    proto.replica_count, proto.computation_count = len(rows), len(rows[0])
    for partition in range(len(rows[0])):
        proto.computation_devices.add(replica_device_ids=[row[partition] for row in rows])
    pending.reply(response)


def _get_default_layout(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    dtype, dims, device = codec.dtype_from(request.dtype), tuple(request.dims), request.device_id
    codec.shape_from(values_pb2.Shape(dims=dims))
    session.cluster.hosts_of([device])
    info = session.cluster.welcome.devices[device].info
    key = (dtype, dims, info.kind, request.memory_kind)

    async def work() -> Any:
        if key not in session.layouts:
            session.layouts[key] = await _layout(session, request.device_id, dtype, dims)
        response = pending.response()
        response.get_default_layout.serialized_pjrt_layout = session.layouts[key]
        return response

    pending.reply_later(work())


async def _layout(session: IfrtSession, device: int, dtype: str, dims: tuple[int, ...]) -> bytes:
    """What the device's worker says; where that is lost, one of another island with devices of this kind.

    Raises UNIMPLEMENTED whatever the reason: jaxlib's jit (`ComputeCallSignature` in pjit.cc) takes this one for a
    layout that it can do without, and ends the user's process at any other.
    """
    devices = session.cluster.welcome.devices
    own = devices[device]
    elsewhere = {each.island: each for each in devices if each.info.kind == own.info.kind and each.island != own.island}
    failure: StatusError | None = None
    for asked in (own, *elsewhere.values()):
        payload = msgspec.msgpack.encode((dtype, dims, asked.info.ordinal))
        try:
            return await session.cluster.inquire("layout", asked.id, payload=payload)
        except StatusError as error:
            failure = failure or error
    raise unimplemented(f"the default layout of {dtype}{list(dims)} is not known: {failure}")


HANDLERS: dict[str, Handler] = {
    "init": _init,
    "check_future": _check_future,
    "check_value_ready": _check_value_ready,
    "get_default_device_assignment": _get_default_device_assignment,
    "get_default_layout": _get_default_layout,
}
