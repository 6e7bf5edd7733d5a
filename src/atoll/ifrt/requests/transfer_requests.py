"""Arrays to other devices, memories or shardings: programs of one `Transfer`."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import invalid
from atoll.ifrt.pending_request import Handler, PendingRequest
from atoll.ir.program import Transfer, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol.ifrt import arrays_pb2
from atoll.protocol.translation.array_specs import spec_from


def _copy_arrays(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    given = list(request.results)
    with pending.making(given):
        handles = session.handles(given, len(request.arrays))
        targets = []
        for handle in request.arrays:
            source = session.arrays.spec(handle)
            devices = tuple(request.device_ids) or source.sharding.devices
            if len(devices) != len(source.sharding.devices):
                raise invalid(f"an array on {len(source.sharding.devices)} devices cannot be copied to {len(devices)}")
            if len(set(devices)) != len(devices):
                raise invalid("an array is copied to each device once")
            # From jaxlib 0.11.2 on, the client leaves out the kind of the devices' default memory.
            sharding = Sharding(devices, source.sharding.tiling, request.memory_kind)
            targets.append(msgspec.structs.replace(source, sharding=sharding))
        _transfer(pending, "device_put", list(request.arrays), targets, handles, request.copy_semantics, False)
    pending.reply_arrays("copy_arrays", handles)


def _reshard(pending: PendingRequest, request: Any) -> None:
    given = list(request.results)
    with pending.making(given):
        handles = pending.session.handles(given, len(request.arrays))
        targets = [spec_from(each) for each in request.specs]
        if len(targets) != len(request.arrays):
            raise invalid(f"{len(targets)} shardings for {len(request.arrays)} arrays")
        _transfer(pending, "reshard", list(request.arrays), targets, handles, request.copy_semantics, True)
    pending.reply_arrays("reshard_arrays", handles)


def _transfer(
    pending: PendingRequest,
    name: str,
    inputs: list[int],
    targets: list[ArraySpec],
    handles: list[int],
    semantics: int,
    reshard: bool,
) -> None:
    session = pending.session
    donate = semantics == arrays_pb2.DONATE_INPUT
    session.cluster.hosts_of([device for target in targets for device in target.sharding.devices])
    sources = tuple(session.arrays.spec(handle) for handle in inputs)
    node = Transfer(tuple(range(len(inputs))), tuple(targets), donate, reshard)
    program = session.cluster.programs.number((name, sources, node), lambda: single(name, sources, node))
    session.launch(program, inputs, handles, traceback_id=pending.context)
    if donate:
        for handle in inputs:
            session.arrays.get(handle).memory.delete()
    session.define(handles, targets, pending.context)


HANDLERS: dict[str, Handler] = {
    "copy_arrays": _copy_arrays,
    "reshard_arrays": _reshard,
}
