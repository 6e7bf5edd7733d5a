"""A device that stands for the devices of other islands in the client of a host's CPU devices.

A function on several islands of which no devices communicate across islands runs on each island by itself. XLA derives
a device's number in the function (`partition-id`, `replica-id`) from the list of all devices of the function, which
must be devices of the client. One device of a process that does not exist takes the places of all those elsewhere. XLA
executes nothing for it.

XLA's clients learn about the devices of other processes from the key-value store of a coordination service. The only
host of an island has none, so it starts one for itself until its client exists. That costs 10 ms of CPU time, so a host
does so only if its cluster has several islands when it starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jax._src import xla_bridge
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc

from atoll.cluster.environment_variables import JAX_PLATFORMS
from atoll.devices.device_kinds import IslandMembership
from atoll.devices.xla.coordination_service import start_service
from atoll.protocol.protobuf_fields import field

# xla/pjrt/cpu/cpu_device.h: the devices of a process have numbers from this times its number.
_DEVICES_PER_PROCESS = 2048
# Fields of LocalTopologyProto and DeviceProto in xla/pjrt/distributed/protocol.proto.
_NODE, _BOOT, _DEVICES = 1, 2, 3
_GLOBAL_ID, _VENDOR, _DEBUG_STRING, _STRING = 4, 8, 9, 10


def announce(coordination: Any, processes: int) -> None:
    """Announce the remote device to the clients of `processes` processes, as that of one more process."""
    number = processes * _DEVICES_PER_PROCESS
    device = field(_GLOBAL_ID, number) + field(_VENDOR, b"cpu")
    device += field(_DEBUG_STRING, b"elsewhere") + field(_STRING, b"elsewhere")
    topology = field(_NODE, processes) + field(_BOOT, b"elsewhere") + field(_DEVICES, device)
    coordination.key_value_set_bytes(f"cpu:local_topology/cpu/{processes}", topology)


def make_client(coordination: Any, process: int, processes: int, collectives: Any = None) -> Any:
    """Return a client of CPU devices for one of `processes` processes, after `announce`, with the remote device."""
    devices = xla_bridge.num_cpu_devices.value
    return xc.make_cpu_client(
        asynchronous=xla_bridge._CPU_ENABLE_ASYNC_DISPATCH.value,
        distributed_client=coordination,
        node_id=process,
        num_nodes=processes + 1,
        collectives=collectives,
        num_devices=devices if devices > 0 else None,
    )


def make_client_alone(directory: str) -> Any:
    """Return a client of CPU devices for a host without others in its island, with the remote device.

    Meanwhile, there is a socket in `directory`.
    """
    socket = Path(directory) / f"devices-{os.getpid()}.sock"
    service = start_service(f"unix:{socket}", 1, shutdown_timeout=1)
    try:
        coordination = _jax.get_distributed_runtime_client(f"unix:{socket}", 0, init_timeout=60)
        coordination.connect()
        try:
            announce(coordination, 1)
            return make_client(coordination, 0, 1)
        finally:
            coordination.shutdown()
    finally:
        service.shutdown()
        socket.unlink(missing_ok=True)


def prepare(member: IslandMembership | None, directory: str) -> None:
    """Have JAX in this process make its client of CPU devices with the remote device, unless `xla_island` does so.

    `directory` is removed if this process is killed.
    """
    if member is None and JAX_PLATFORMS.text() == "cpu":
        use(partial(make_client_alone, directory))


def use(make: Callable[[], Any]) -> None:
    """Have JAX in this process make its client of CPU devices so."""
    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)
