"""jaxlib's IFRT proxy client, which JAX uses as its backend.

This module imports all patches of JAX, which takes as long as the start of the engine. Therefore `backend` imports it
while the processes of the client start.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.client.client_caches import clear_with_client
from atoll.client.forks import ForkGuard
from atoll.client.grpc_polling import polled_by_callers
from atoll.client.jax_patches import ffi_calls, host_callbacks, install, number_operands
from atoll.client.jaxlib_logging import silenced_jaxlib, unsilence_jaxlib
from atoll.client.timer_slack import measure_clock, relaxed

_LARGE_TRANSFER_BYTES = 256 * 1024  # arrays of this size or more reach the proxy through files in shared memory
_CONNECT_SECONDS = 30


def prepare() -> None:
    """Do what a connection needs, and what does not need the proxy: install the patches of JAX."""
    install()
    measure_clock()


def connect(address: str, transfer_directory: Path, guard: ForkGuard, losses: Callable[[], int]) -> Any:
    """Return a client that is connected to the proxy at this address. Raise RuntimeError if that fails.

    Args:
        address: Of the proxy, as gRPC writes it.
        transfer_directory: For large arrays on their way to the proxy.
        guard: Cuts forked children off from the client.
        losses: Returns how many times the cluster has lost hosts with their arrays.
    """
    os.environ["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = "true"
    os.environ["IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"] = str(transfer_directory)
    os.environ["IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES"] = str(_LARGE_TRANSFER_BYTES)
    # jaxlib's client reads these variables when it first connects.
    from jax._src.lib import ifrt_proxy

    unsilence_jaxlib()
    clear_with_client(host_callbacks.CLIENT_CHANNEL)
    clear_with_client(ffi_calls.SENT)
    clear_with_client(number_operands.CONSTANTS)
    options = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = _CONNECT_SECONDS
    with silenced_jaxlib(), relaxed(), polled_by_callers(), guard.connecting() as clients:
        client = ifrt_proxy.get_client(f"grpc://{address}", options)
        clients.append(client)
    # Never destroy the client: its destructor reports the end of the connection as an error.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    number_operands.CONSTANTS.open(client, losses)
    return client
