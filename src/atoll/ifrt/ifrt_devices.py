"""The cluster's devices as a client sees them: the reply to its first request."""

from __future__ import annotations

from typing import Any

from atoll._version import __version__
from atoll.protocol.ifrt import session_pb2
from atoll.protocol.messages import Welcome
from atoll.protocol.translation.platforms import platform_id


def init_reply(welcome: Welcome, session: int) -> Any:
    """Every device of every island, all addressable, all of process 0, as JAX's libraries expect them.

    `slice_index` is the island; a CPU device is its own colocated one (JAX reads `colocation_id`). Memories are
    numbered device by device; a memory belongs to one device. The names are stock JAX's where all are on one host.
    """
    reply = session_pb2.InitReply(
        session_id=session,
        platform_name=welcome.platform,
        platform_version=f"{welcome.platform_version}; atoll {__version__}",
        platform_id=platform_id(welcome.platform),
        process_index=0,
        runtime_type="atoll",
    )
    is_one_host = len({(device.island, device.host) for device in welcome.devices}) == 1
    memory_id = 0
    kinds: dict[str, int] = {}
    for device in welcome.devices:
        info = device.info
        name = f"{info.platform}:{device.id}"
        entry = reply.all_devices.add(
            id=device.id,
            local_device_id=device.id,
            local_hardware_id=info.local_hardware_id,
            platform_name=info.platform,
            device_kind=info.kind,
            debug_string=name if is_one_host else f"{name} (island {device.island}, host {device.host})",
            to_string=f"{info.platform.capitalize()}Device(id={device.id})"
            if is_one_host
            else f"AtollDevice(id={device.id}, island={device.island}, host={device.host})",
        )
        for attribute, value in info.attributes:
            _set(entry.attributes, attribute, value)
        _set(entry.attributes, "slice_index", device.island)
        _set(entry.attributes, "coords", list(info.coords))
        _set(entry.attributes, "core_on_chip", info.core_on_chip)
        _set(entry.attributes, "host", device.host)
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
    _set(reply.client_attributes, "serialize_with_sdy", True)  # jax.export asks; the workers' own clients say so
    # By jaxlib's client alone they cannot; Atoll's plug-in can (client/jax_patches/serialized_executables.py).
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
