"""Requests for information about the session: devices, futures, readiness of arrays, and defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll._version import __version__
from atoll.errors import OK, Status, StatusError, unimplemented
from atoll.executables.compile_requests import default_assignment
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.protocol.ifrt import session_pb2, values_pb2
from atoll.protocol.messages import ArrayKind, QueryKind, Welcome
from atoll.protocol.translation import codec
from atoll.protocol.translation.codec import platform_id


def _init(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    session = pending.session
    response.init.CopyFrom(init_reply(session.cluster.welcome, session.number))
    pending.reply_out_of_sequence(response)


def init_reply(welcome: Welcome, session: int) -> Any:
    """Return the reply with all devices of all islands, as JAX's libraries expect them.

    All devices are addressable and belong to process 0. `slice_index` is the island. A CPU device is its own colocated
    device (JAX reads `colocation_id`). Memories are numbered by device, and each belongs to one device. If there is
    only one host, devices have the names of stock JAX.

    Libraries find the host of a device in its island by `virtual_task_index`, or by `vtask=` or `logical_task=` in the
    name. Some of them match the comma before or after the word, without a space.
    """
    reply = session_pb2.InitReply(
        session_id=session,
        platform_name=welcome.platform,
        platform_version=f"{welcome.platform_version}; atoll {__version__}",
        platform_id=platform_id(welcome.platform),
        process_index=0,
        runtime_type="atoll",
    )
    hosts = sorted({(device.island, device.host) for device in welcome.devices})
    is_one_host = len(hosts) == 1
    first_of_island: dict[int, int] = {}
    for position, (island, _) in enumerate(hosts):
        first_of_island.setdefault(island, position)
    tasks = {host: position - first_of_island[host[0]] for position, host in enumerate(hosts)}
    memory_id = 0
    kinds: dict[str, int] = {}
    for device in welcome.devices:
        info = device.info
        name = f"{info.platform}:{device.id}"
        task = tasks[device.island, device.host]
        entry = reply.all_devices.add(
            id=device.id,
            local_device_id=device.id,
            local_hardware_id=info.local_hardware_id,
            platform_name=info.platform,
            device_kind=info.kind,
            debug_string=name if is_one_host else f"{name} (island {device.island}, host {device.host})",
            to_string=f"{info.platform.capitalize()}Device(id={device.id})"
            if is_one_host
            else f"AtollDevice(id={device.id},island={device.island},host={device.host},vtask={task},"
            f"logical_task={task},slice={device.island})",
        )
        for attribute, value in info.attributes:
            _set(entry.attributes, attribute, value)
        _set(entry.attributes, "slice_index", device.island)
        _set(entry.attributes, "coords", list(info.coords))
        _set(entry.attributes, "core_on_chip", info.core_on_chip)
        _set(entry.attributes, "host", device.host)
        _set(entry.attributes, "hardware_id", info.local_hardware_id)
        _set(entry.attributes, "virtual_task_index", task)
        _set(entry.attributes, "num_cores", 1)
        _set(entry.attributes, "colocation_id", device.id)
        for kind in info.memories:
            entry.memory_ids.append(memory_id)
            if kind == info.default_memory:
                entry.default_memory_id = memory_id
            reply.memories.add(
                id=memory_id,
                memory_space_kind=kind,
                kind_id=kinds.setdefault(kind, len(kinds)),
                device_ids=[device.id],
                debug_string=f"{kind} of {name}",
                to_string=f"AtollMemory(kind={kind}, device={device.id})",
            )
            memory_id += 1
        reply.primary_device_ids.append(device.id)
        reply.addressable_device_ids.append(device.id)
    _set(reply.client_attributes, "runtime", "atoll")
    _set(reply.client_attributes, "serialize_with_sdy", True)  # as the workers' clients do; jax.export reads it
    # jaxlib's client cannot, but Atoll's plug-in can (client/jax_patches/serialized_executables.py).
    _set(reply.client_attributes, "supports_executable_serialization", False)
    return reply


def _set(attributes: Any, name: str, value: bool | int | str | list[int]) -> None:
    entry = attributes.attributes[name]
    if isinstance(value, bool):
        entry.bool_value = value
    elif isinstance(value, int):
        entry.int64_value = value
    elif isinstance(value, str):
        entry.string_value = value.encode()
    else:
        entry.int64_list_value.elements.extend(value)


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
    records = [session.arrays.get_to_await(handle) for handle in handles]

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
    if dtype == "string":
        raise unimplemented("an array of strings has no layout")  # `Array.format` then has the layout None
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
    """Return the default layout from the device's worker, or if that is lost, from one with devices of the same kind.

    Raise UNIMPLEMENTED for any failure. jaxlib's jit (`ComputeCallSignature` in pjit.cc) then continues without the
    layout, but ends the user's process on any other error.
    """
    devices = session.cluster.welcome.devices
    own = devices[device]
    elsewhere = {each.island: each for each in devices if each.info.kind == own.info.kind and each.island != own.island}
    failure: StatusError | None = None
    for asked in (own, *elsewhere.values()):
        payload = msgspec.msgpack.encode(ArrayKind(dtype, dims, asked.info.ordinal))
        try:
            return await session.cluster.inquire(QueryKind.LAYOUT, asked.id, payload=payload)
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
