"""Arrays to other devices, memories or shardings: programs of one `Transfer`."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import invalid
from atoll.frontends.ifrt import codec
from atoll.frontends.ifrt.session import Exchange, Handler
from atoll.ir.program import Transfer, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol.ifrt import arrays_pb2


def _copy_arrays(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    given = list(request.results)
    with exchange.defining(given):
        handles = session.handles(given, len(request.arrays))
        targets = []
        for handle in request.arrays:
            source = session.arrays.spec(handle)
            devices = tuple(request.device_ids) or source.sharding.devices
            if len(devices) != len(source.sharding.devices):
                raise invalid(f"an array on {len(source.sharding.devices)} devices cannot be copied to {len(devices)}")
            if len(set(devices)) != len(devices):
                raise invalid("an array is copied to each device once")
            kind = request.memory_kind if request.HasField("memory_kind") else source.sharding.memory_kind
            sharding = Sharding(devices, source.sharding.tiling, kind)
            targets.append(msgspec.structs.replace(source, sharding=sharding))
        _transfer(exchange, "device_put", list(request.arrays), targets, handles, request.copy_semantics, False)
    exchange.made("copy_arrays", handles)


def _reshard(exchange: Exchange, request: Any) -> None:
    given = list(request.results)
    with exchange.defining(given):
        handles = exchange.session.handles(given, len(request.arrays))
        targets = [codec.spec_from(each) for each in request.specs]
        if len(targets) != len(request.arrays):
            raise invalid(f"{len(targets)} shardings for {len(request.arrays)} arrays")
        _transfer(exchange, "reshard", list(request.arrays), targets, handles, request.copy_semantics, True)
    exchange.made("reshard_arrays", handles)


def _transfer(
    exchange: Exchange,
    name: str,
    inputs: list[int],
    targets: list[ArraySpec],
    handles: list[int],
    semantics: int,
    reshard: bool,
) -> None:
    session = exchange.session
    donate = semantics == arrays_pb2.DONATE_INPUT
    session.link.hosts_of([device for target in targets for device in target.sharding.devices])
    sources = tuple(session.arrays.spec(handle) for handle in inputs)
    node = Transfer(tuple(range(len(inputs))), tuple(targets), donate, reshard)
    program = session.program((name, sources, node), lambda: single(name, sources, node))
    session.launch(program, inputs, handles, context=exchange.context)
    if donate:
        for handle in inputs:
            session.arrays.get(handle).memory.delete()
    session.define(handles, targets, exchange.context)


HANDLERS: dict[str, Handler] = {
    "copy_arrays": _copy_arrays,
    "reshard_arrays": _reshard,
}
