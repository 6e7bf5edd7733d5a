"""An island of several hosts: their processes join one XLA mesh before any of them makes its backend.

The process of the island's first host runs the coordination service. It need not outlive the others: an island that has
lost a host is restarted as a whole, since its broken collectives stay broken.
"""

from __future__ import annotations

import time
from functools import partial

import jax
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from atoll.devices.xla.batch_threads import batch_threads
from atoll.errors import ConnectError
from atoll.wire.address import parse_address
from atoll.wire.sockets import dial

JOIN_SECONDS = 100
# XLA's own idea of a lost process: a last resort. The engine sees a death, and the controller a silence, long before.
_HEARTBEAT_SECONDS = 100
_DIAL_SECONDS = 1.0
_RETRY_SECONDS = 0.05


def join(address: str, rank: int, hosts: int, hostname: str) -> None:
    """Joins the island as host `rank` of `hosts`, whose first serves at `address`, such as unix:/path.

    What the hosts' processes say to each other while they compute is received at `hostname`. Raises JaxRuntimeError
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
