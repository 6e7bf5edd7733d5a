"""How a host's process joins the XLA mesh of its island.

The processes of an island join before any of them creates its backend. The process of the first host runs the
coordination service. If one process ends, the engine restarts the whole island, because its collectives cannot recover.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed
from jax._src.lib import _jax

from atoll.cluster.environment_variables import JAX_PLATFORMS, NCCL_INTERFACE
from atoll.devices.xla import remote_device
from atoll.devices.xla.batch_threads import start_batch_threads
from atoll.devices.xla.coordination_service import start_service
from atoll.errors import ConnectError
from atoll.retries import Retry
from atoll.wire.address import Address, parse_address
from atoll.wire.sockets import dial

JOIN_SECONDS = 100
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
# XLA ends all processes of an island if one sends no heartbeat for this time (three years) by the system's clock. A
# shorter time would end healthy islands when the clock is set or the machine is suspended. The engine and the
# controller detect failed processes themselves. A process sends a heartbeat in each half of this time. XLA treats a
# heartbeat from the future as an old one, so it still ends an island if the clock is set back by more than its age.
HEARTBEAT_SECONDS = 100_000_000
_DIAL_SECONDS = 1.0
_RETRY_SECONDS = 0.05


def join(address: str, rank: int, hosts: int, hostname: str) -> None:
    """Join the island as host `rank` of `hosts`. The first host serves at `address`, such as unix:/path.

    Collectives (gloo for CPU devices, NCCL for GPUs) receive messages at `hostname`. Raises JaxRuntimeError if the
    other hosts do not join within `JOIN_SECONDS`.
    """
    state = distributed.global_state
    if rank == 0:
        state.service = start_service(address, hosts, heartbeat_timeout=HEARTBEAT_SECONDS, shutdown_timeout=1)
    else:
        await_service(address, JOIN_SECONDS)
    state.client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=JOIN_SECONDS, use_compression=False, heartbeat_timeout=HEARTBEAT_SECONDS
    )
    state.client.connect()
    state.process_id, state.num_processes = rank, hosts
    if JAX_PLATFORMS.text() != "cpu":
        use_network(hostname)  # JAX's GPU plug-ins find the other hosts through the client, and use NCCL
        return
    with start_batch_threads():
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=state.client, hostname=hostname)
    if rank == 0:
        remote_device.announce(state.client, hosts)
    remote_device.use(partial(remote_device.make_client, state.client, rank, hosts, collectives))


def await_service(address: str, seconds: float) -> None:
    """Wait until the first host is reachable. XLA's client would notice that late, because it backs off."""
    where = parse_address(address)
    reach = partial(dial, where, what="the first host of the island", timeout=_DIAL_SECONDS)
    if not where.is_unix:
        with suppress(ConnectError):
            Retry(_RETRY_SECONDS, patience=seconds).call(reach, ConnectError).close()


class XlaKeyValues:
    """The key-value store of hosts that share a coordination service: a `host_services.python.rendezvous.KeyValues`.

    `client` is connected to the service, which is that of an island or of a world.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(key, value, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"cannot store {key!r} for the other hosts: {error}") from None

    def get(self, key: str, seconds: float) -> str:
        try:
            found: str = self._client.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"no value for {key!r} from the other hosts: {error}") from None
        return found


def key_values() -> XlaKeyValues | None:
    """Return the store of this host's island; None if the island has no other host."""
    client = distributed.global_state.client
    return None if client is None else XlaKeyValues(client)


def use_network(hostname: str) -> None:
    """Make NCCL (and RCCL) use the interface with this address, unless the user has chosen one.

    NCCL chooses the interface itself if the address is local.
    """
    interface = "" if Address(host=hostname).is_local else interface_of(hostname)
    if interface:
        os.environ.setdefault(NCCL_INTERFACE.variable, f"={interface}")


def interface_of(hostname: str) -> str:
    """Return the name of this machine's network interface with that address; "" if it has no such interface."""
    try:
        (family, *_, (address, *_)), *_ = socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM)
        for _, name in socket.if_nameindex():
            if family == socket.AF_INET and _address_of(name) == address:
                return name
        packed = socket.inet_pton(family, str(address)).hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[-1] for line in lines if line.startswith(packed)), "")


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # the interface has no IPv4 address
            return ""
    return socket.inet_ntoa(reply[20:24])


def keep_compiled_programs() -> None:
    """Make this process write to the persistent cache.

    JAX only lets process 0 write, but hosts may have separate disks.
    """
    distributed.global_state.process_id = 0


def devices_by_host(devices: Iterable[jax.Device]) -> tuple[tuple[jax.Device, ...], ...]:
    """Return the devices of a client as [host][ordinal]."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return tuple(tuple(sorted(hosts[number], key=lambda device: device.id)) for number in sorted(hosts))
