"""An island of several hosts: their processes join one XLA mesh before any of them makes its backend.

The process of the island's first host runs the coordination service. It need not outlive the others: an island that has
lost a host is restarted as a whole, since its broken collectives stay broken.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from functools import partial
from pathlib import Path

import jax
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from atoll.devices.xla.batch_threads import batch_threads
from atoll.errors import ConnectError
from atoll.wire.address import Address, parse_address
from atoll.wire.sockets import dial

JOIN_SECONDS = 100
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
# XLA ends all processes of an island if one sends no heartbeats for so long by the system's clock. That also ends
# healthy ones if the clock is set, or if the machine was suspended, so it never happens within three years. The engine
# sees the death of a process, and the controller its silence. A heartbeat is sent in each half of this time. XLA takes
# one from the future for an old one, so a clock that is set back by more than the age of the island still ends it.
_HEARTBEAT_SECONDS = 100_000_000
_DIAL_SECONDS = 1.0
_RETRY_SECONDS = 0.05


def join(address: str, rank: int, hosts: int, hostname: str) -> None:
    """Joins the island as host `rank` of `hosts`, whose first serves at `address`, such as unix:/path.

    What the hosts' processes say to each other while they compute is received at `hostname`: by gloo for CPU devices,
    and by NCCL for GPUs. Raises JaxRuntimeError
    where the others do not come within `JOIN_SECONDS`.
    """
    state = distributed.global_state
    if rank == 0:
        state.service = _jax.get_distributed_runtime_service(
            address, hosts, heartbeat_timeout=_HEARTBEAT_SECONDS, shutdown_timeout=1
        )
    else:
        _await_service(address)
    state.client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=JOIN_SECONDS, use_compression=False, heartbeat_timeout=_HEARTBEAT_SECONDS
    )
    state.client.connect()
    state.process_id, state.num_processes = rank, hosts
    if os.environ.get("JAX_PLATFORMS", "") != "cpu":
        use_network(hostname)  # JAX's plug-ins for GPUs find the others by the client, and use NCCL
        return
    with batch_threads():
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=state.client, hostname=hostname)
    xla_bridge.register_backend_factory(
        "cpu", partial(xla_bridge.make_cpu_client, collectives), priority=0, fail_quietly=False
    )


def _await_service(address: str) -> None:
    """Waits until the first host can be reached, which XLA's client would notice late: it tries less and less often."""
    where = parse_address(address)
    deadline = time.monotonic() + JOIN_SECONDS
    while not where.is_unix and time.monotonic() < deadline:
        try:
            dial(where, what="the first host of the island", timeout=_DIAL_SECONDS).close()
            return
        except ConnectError:
            time.sleep(_RETRY_SECONDS)


class KeyValues:
    """What hosts of the island tell one another: see `host_services.python.rendezvous.KeyValues`. Once joined."""

    def set(self, key: str, value: str) -> None:
        try:
            distributed.global_state.client.key_value_set(key, value, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"the other hosts of the island cannot be told: {error}") from None

    def get(self, key: str, seconds: float) -> str:
        try:
            found: str = distributed.global_state.client.blocking_key_value_get(key, int(seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"the first host of the island does not say where to meet: {error}") from None
        return found


def key_values() -> KeyValues | None:
    """Of this host's island; None where it is alone in it."""
    return None if distributed.global_state.client is None else KeyValues()


def use_network(hostname: str) -> None:
    """Has NCCL (and RCCL) use the interface with this address, unless the user has chosen one.

    One machine's own address says nothing, and NCCL chooses.
    """
    interface = "" if Address(host=hostname).is_local else interface_of(hostname)
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def interface_of(hostname: str) -> str:
    """The name of this machine's network interface with that address; "" where it has none."""
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
        except OSError:  # it has none of IPv4
            return ""
    return socket.inet_ntoa(reply[20:24])


def keep_compiled_programs() -> None:
    """Has this process write to the persistent cache: JAX leaves it to the process of number 0.

    Each host compiles programs of its own, and hosts need not share a disk.
    """
    distributed.global_state.process_id = 0


def devices_by_host() -> tuple[tuple[jax.Device, ...], ...]:
    """The island's devices: [host][ordinal]."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        hosts.setdefault(device.process_index, []).append(device)
    return tuple(tuple(sorted(hosts[number], key=lambda device: device.id)) for number in sorted(hosts))
