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
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc

from atoll.devices.xla.batch_threads import start_batch_threads
from atoll.devices.xla.coordination_service import start_service
from atoll.devices.xla.gloo_connections import GlooConnections
from atoll.devices.xla.world_relay import WorldRelay
from atoll.devices.xla.xla_arrays import UnevenShards, shards_of, stacked_type
from atoll.devices.xla.xla_island import (
    HEARTBEAT_SECONDS,
    XlaKeyValues,
    await_service,
    devices_by_host,
)
from atoll.errors import Code, StatusError

# For all hosts of a world to join it.
JOIN_SECONDS = 60
# Worlds that were closed last.
_CLOSED_WORLDS = 1024
# A service lives for this time after its world was closed.
_SERVICE_SECONDS = 30.0
# After a world was closed, its connections are examined for this time, since devices may connect late.
_CLOSE_SECONDS = 10.0
# The time from one look to the next, at first and later.
_PATIENT_SECONDS, _STEP_SECONDS = 0.01, 0.1
# For devices that are connecting to finish that, and for the absence of such devices to be certain.
_CONNECT_SECONDS, _QUIET_SECONDS = 3.0, 0.2
# For an answer of the coordination service. If it takes longer, the request concerns a device that does not connect.
_ANSWER_SECONDS = 1.0
# For messages that are being sent or received.
_MESSAGE_SECONDS = 0.5
_EPOLL = "anon_inode:[eventpoll]"
# For the thread of gloo to wait for messages, after it has started.
_LOOP_SECONDS = 10.0


class XlaWorld:
    """This process's client in a world.

    Args:
      relay: a relay to the world's coordination service, which runs on the host of rank 0.
      rank: of this host.
      ranks: number of hosts.
      hostname: where collectives receive messages of other hosts.
      devices: number of devices of this host.

    Raises StatusError if the relay is closed meanwhile, or if the other hosts do not join within `JOIN_SECONDS`.
    """

    def __init__(self, relay: WorldRelay, rank: int, ranks: int, hostname: str, devices: int) -> None:
        self._relay = relay
        with ExitStack() as unless_joined:
            unless_joined.callback(self._relay.close)
            self._join(rank, ranks, hostname, devices)
            unless_joined.pop_all()

    def _join(self, rank: int, ranks: int, hostname: str, devices: int) -> None:
        self._coordination = _jax.get_distributed_runtime_client(
            self._relay.address,
            rank,
            init_timeout=2 * JOIN_SECONDS,  # XLA would end the process
            use_compression=False,
            heartbeat_timeout=HEARTBEAT_SECONDS,
            shutdown_on_destruction=False,
        )
        limit = threading.Timer(JOIN_SECONDS, self._relay.close)
        limit.daemon = True
        limit.start()
        self._coordination.connect()
        limit.cancel()
        if self._relay.is_closed:
            text = (
                f"the world was closed before all hosts had joined it, or they have not joined within {JOIN_SECONDS} s"
            )
            raise StatusError(Code.UNAVAILABLE, text)
        with start_batch_threads():
            with _named_threads() as names:
                collectives = _jax.make_gloo_tcp_collectives(distributed_client=self._coordination, hostname=hostname)
                epolls = _epolls_of(names)
            self.client = xc.make_cpu_client(
                asynchronous=True,
                distributed_client=self._coordination,
                node_id=rank,
                num_nodes=ranks,
                collectives=collectives,
                num_devices=devices,
            )
        self.key_values = XlaKeyValues(self._coordination)
        self.hosts = devices_by_host(self.client.devices())
        self.devices: tuple[Any, ...] = self.hosts[rank]
        self._connections = GlooConnections(epolls)

    def close(self) -> None:
        """End the collectives in flight, on another thread. They fail. Any thread."""
        threading.Thread(target=self._close, name="atoll-world-close", daemon=True).start()

    def _close(self) -> None:
        """Break the connections to the other hosts, when no device is about to connect.

        Gloo reports the end of a host only to the devices that are connected to it, and the others wait for those. So
        all connections are closed, also those that are made later.
        """
        began = connecting = time.monotonic()  # `connecting`: when devices were connecting
        shut: float | None = None  # since when connections are closed
        while (now := time.monotonic()) - began < _CLOSE_SECONDS:
            self._relay.reset_late(_ANSWER_SECONDS)
            if self._connections.examine() or self._relay.has_requests:
                connecting = now
            if shut is None and (now - connecting > _QUIET_SECONDS or now - began > _CONNECT_SECONDS):
                shut = now
            is_patient = shut is None or now - shut < _MESSAGE_SECONDS
            if shut is not None:
                self._connections.shut(is_patient)
            time.sleep(_PATIENT_SECONDS if is_patient else _STEP_SECONDS)
        self._relay.close()
        self._connections.release()


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


class XlaWorlds:
    """The worlds of this process: a `devices.device.WorldMaker`. Safe to use from any thread."""

    def __init__(self, client: Any, devices: tuple[Any, ...]) -> None:
        self._client = client  # the host's own
        self._devices = devices
        self._services: dict[int, Any] = {}
        self._worlds: dict[int, XlaWorld] = {}
        self._lock = threading.Lock()  # for the next two fields
        self._joining: dict[int, WorldRelay] = {}
        self._closed: deque[int] = deque(maxlen=_CLOSED_WORLDS)  # which this host may be about to join
        self._have_been_joined = False

    def serve(self, world: int, address: str, ranks: int) -> None:
        self._services[world] = start_service(address, ranks, heartbeat_timeout=HEARTBEAT_SECONDS, shutdown_timeout=1)

    def join(self, world: int, address: str, rank: int, ranks: int, hostname: str) -> None:
        await_service(address, JOIN_SECONDS)
        relay = WorldRelay(address, JOIN_SECONDS)
        with self._lock:
            self._joining[world] = relay
            is_closed = world in self._closed
        if is_closed:
            relay.close()
        try:
            self._worlds[world] = XlaWorld(relay, rank, ranks, hostname, len(self._devices))
        finally:
            with self._lock:
                del self._joining[world]
        self._have_been_joined = True

    def close(self, world: int) -> None:
        with self._lock:
            self._closed.append(world)
            joining = self._joining.get(world)
        if joining is not None:
            joining.close()
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

    def key_values(self, world: int) -> XlaKeyValues:
        return self.get(world).key_values

    def client_and_hosts(self, world: int) -> tuple[Any, tuple[tuple[Any, ...], ...]]:
        """Return the client of a world, and its devices as [rank][ordinal]."""
        found = self.get(world)
        return found.client, found.hosts

    def devices_in(self, world: int) -> tuple[Any, ...]:
        """Return this host's devices, by ordinal, as the client of the world has them."""
        return self.get(world).devices if world else self._devices

    @property
    def have_been_joined(self) -> bool:
        return self._have_been_joined

    def is_at_home(self, array: Any, world: int) -> bool:
        client = shards_of(array)[0].device.client
        return client is (self.get(world).client if world else self._client)

    def world_of(self, array: Any) -> int:
        client = shards_of(array)[0].device.client
        return next((world for world, each in list(self._worlds.items()) if each.client is client), 0)

    def bring(self, array: Any, world: int) -> Any:
        """Return the array on the same devices of another client.

        On CPUs, the host array of a shard is its memory, and a device array that is made of it refers to that.
        """
        shards = shards_of(array)
        if isinstance(array, UnevenShards):
            return UnevenShards(tuple(self.bring(each, world) for each in shards))
        before, after = shards[0].device.client.local_devices(), self.devices_in(world)
        devices = tuple(after[before.index(each.device)] for each in shards)
        contents = [np.asarray(each) for each in shards]
        kind = array.sharding.memory_kind or ""
        aval, sharding = stacked_type(contents[0].dtype, contents[0].shape, devices, kind)
        return xc.batched_device_put(aval, sharding, contents, list(devices), True)
