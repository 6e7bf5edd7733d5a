"""XLA worlds: clients that the hosts of several islands share, for functions that run on devices of all of them.

A host has its own XLA client, whose devices are those of its island. It joins the hosts of other islands with one more
client per set of islands, a *world*. The devices of a world's client are the same CPUs, and its arrays can be passed to
the host's own client and back without copying (`XlaWorlds.bring`).

If a host of a world ends, the world is closed: `close` breaks its connections, so that collectives in flight fail
instead of waiting for that host forever. Other work of the remaining hosts continues. When the island is ready again,
its hosts and the others form a new world. XLA then needs no ranks for hosts that restart, and hosts may join later.

Worlds exist only on CPU devices. On other platforms, a second client could not use the devices of the first.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc

from atoll.devices.xla.world_relay import WorldRelay
from atoll.devices.xla.xla_arrays import Uneven, shards_of, stacked_type
from atoll.devices.xla.xla_island import (
    HEARTBEAT_SECONDS,
    KeyValues,
    await_service,
    devices_by_host,
    sched_batch_threads,
)
from atoll.errors import Code, StatusError

# For all hosts of a world to join it.
JOIN_SECONDS = 60
# A service lives for this time after its world was closed.
_SERVICE_SECONDS = 30.0
_EPOLL = "anon_inode:[eventpoll]"
# A line about a descriptor in the set of an epoll descriptor, in /proc/self/fdinfo.
_FIELDS = re.compile(r"tfd:\s*(\d+) .*\bino:([0-9a-f]+)")
# How often and how long apart connections of a closed world are closed: for 10 s.
_SHUTS, _SHUT_SECONDS = 100, 0.1
# For the thread of gloo to wait for messages, after it has started.
_LOOP_SECONDS = 10.0


class XlaWorld:
    """This process's client in a world.

    Args:
      address: that of the world's coordination service, which runs on the host of rank 0.
      rank: of this host.
      ranks: number of hosts.
      hostname: where collectives receive messages of other hosts.
      devices: number of devices of this host.

    Raises JaxRuntimeError if the other hosts do not join within `JOIN_SECONDS`.
    """

    def __init__(self, address: str, rank: int, ranks: int, hostname: str, devices: int) -> None:
        await_service(address, JOIN_SECONDS)
        self._relay = WorldRelay(address, JOIN_SECONDS)
        self._coordination = _jax.get_distributed_runtime_client(
            self._relay.address,
            rank,
            init_timeout=JOIN_SECONDS,
            use_compression=False,
            heartbeat_timeout=HEARTBEAT_SECONDS,
            shutdown_on_destruction=False,
        )
        self._coordination.connect()
        with sched_batch_threads():
            with _named_threads() as names:
                collectives = _jax.make_gloo_tcp_collectives(distributed_client=self._coordination, hostname=hostname)
                # Copies keep their sets, while the numbers of gloo's own may be in use again after its end.
                self._epolls = frozenset(map(os.dup, _epolls_of(names)))
            self.client = xc.make_cpu_client(
                asynchronous=True,
                distributed_client=self._coordination,
                node_id=rank,
                num_nodes=ranks,
                collectives=collectives,
                num_devices=devices,
            )
        self.key_values = KeyValues(self._coordination)
        self.hosts = devices_by_host(self.client.devices())
        self.devices: tuple[Any, ...] = self.hosts[rank]

    def close(self) -> None:
        """Break the connections to the other hosts, so that collectives in flight fail. Any thread.

        Gloo reports the end of a host only to the devices that are connected to it, and the others wait for those.
        Devices may be about to connect, so this is repeated for a while. Connections are closed for reading only: if
        gloo's thread cannot write a message, gloo forgets to report the error to the device that waits for its sending.
        """
        self._relay.close()
        self._shut()
        threading.Thread(target=self._keep_shut, name="atoll-world-close", daemon=True).start()

    def _keep_shut(self) -> None:
        for _ in range(_SHUTS):
            time.sleep(_SHUT_SECONDS)
            self._shut()
        for epoll in self._epolls:
            os.close(epoll)
        self._epolls = frozenset()

    def _shut(self) -> None:
        for epoll in self._epolls:
            for descriptor, inode in _watched(epoll):
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
                    is_same = os.fstat(each.fileno()).st_ino == inode  # gloo may have closed it meanwhile
                    if is_same and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        each.shutdown(socket.SHUT_RD)


@contextmanager
def _named_threads() -> Iterator[str]:
    """Give this thread another name, which Linux passes on to the threads that it starts, such as that of gloo."""
    own = f"/proc/self/task/{threading.get_native_id()}/comm"
    before, name = _read(own), secrets.token_hex(7)
    with open(own, "w") as file:
        file.write(name)
    try:
        yield name
    finally:
        with open(own, "w") as file:
            file.write(before)


def _epolls_of(name: str) -> set[int]:
    """Return the epoll descriptors that other threads with this name wait for. Gloo has one for a world's connections.

    Raises StatusError if they do not wait for any.
    """
    deadline = time.monotonic() + _LOOP_SECONDS
    while time.monotonic() < deadline:
        found = set()
        for thread in os.listdir("/proc/self/task"):
            task = f"/proc/self/task/{thread}"
            if thread != str(threading.get_native_id()) and _read(f"{task}/comm").strip() == name:
                call = _read(f"{task}/syscall").split()  # number and arguments, or "running"
                descriptor = int(call[1], 16) if len(call) > 1 else -1
                with suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{descriptor}") == _EPOLL:
                        found.add(descriptor)
        if found:
            return found
        time.sleep(0.001)
    raise StatusError(Code.UNIMPLEMENTED, "cannot find the connections of the collectives in /proc/self/task/*/syscall")


def _read(path: str) -> str:
    """Return the content of a file in /proc, or nothing if its thread has ended."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _watched(epoll: int) -> list[tuple[int, int]]:
    """Return the descriptors in the set of an epoll descriptor, with their inodes."""
    found = []
    for line in _read(f"/proc/self/fdinfo/{epoll}").splitlines():
        fields = _FIELDS.match(line)
        if fields is not None:
            found.append((int(fields[1]), int(fields[2], 16)))
    return found


class XlaWorlds:
    """The worlds of this process: a `devices.device.WorldMaker`. Safe to use from any thread."""

    def __init__(self, client: Any, devices: tuple[Any, ...]) -> None:
        self._client = client  # the host's own
        self._devices = devices
        self._services: dict[int, Any] = {}
        self._worlds: dict[int, XlaWorld] = {}

    def serve(self, world: int, address: str, ranks: int) -> None:
        self._services[world] = _jax.get_distributed_runtime_service(
            address, ranks, heartbeat_timeout=HEARTBEAT_SECONDS, shutdown_timeout=1
        )

    def join(self, world: int, address: str, rank: int, ranks: int, hostname: str) -> None:
        self._worlds[world] = XlaWorld(address, rank, ranks, hostname, len(self._devices))

    def close(self, world: int) -> None:
        found = self._worlds.pop(world, None)
        if found is not None:
            found.close()
        service = self._services.pop(world, None)
        if service is not None:
            # The other hosts close the world at the same time. The shutdown itself waits for seconds.
            timer = threading.Timer(_SERVICE_SECONDS, service.shutdown)
            timer.daemon = True
            timer.start()

    def get(self, world: int) -> XlaWorld:
        """Return a world. Raise FAILED_PRECONDITION if it was closed."""
        found = self._worlds.get(world)
        if found is None:
            raise StatusError(Code.FAILED_PRECONDITION, "the hosts that this function runs on have lost one another")
        return found

    def key_values(self, world: int) -> KeyValues:
        return self.get(world).key_values

    def client_and_hosts(self, world: int) -> tuple[Any, tuple[tuple[Any, ...], ...]]:
        """Return the client of a world, and its devices as [rank][ordinal]."""
        found = self.get(world)
        return found.client, found.hosts

    def devices_in(self, world: int) -> tuple[Any, ...]:
        """Return this host's devices, by ordinal, as the client of the world has them."""
        return self.get(world).devices if world else self._devices

    def is_at_home(self, array: Any, world: int) -> bool:
        client = shards_of(array)[0].device.client
        return client is (self.get(world).client if world else self._client)

    def bring(self, array: Any, world: int) -> Any:
        """Return the array on the same devices of another client.

        On CPUs, the host array of a shard is its memory, and a device array that is made of it refers to that.
        """
        shards = shards_of(array)
        if isinstance(array, Uneven):
            return Uneven(tuple(self.bring(each, world) for each in shards))
        before, after = shards[0].device.client.local_devices(), self.devices_in(world)
        devices = tuple(after[before.index(each.device)] for each in shards)
        contents = [np.asarray(each) for each in shards]
        kind = array.sharding.memory_kind or ""
        aval, sharding = stacked_type(contents[0].dtype, contents[0].shape, devices, kind)
        return xc.batched_device_put(aval, sharding, contents, list(devices), True)
