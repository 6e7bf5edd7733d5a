"""(g), (h): arrays from island to island, and a pipeline in which each stage is on a different island."""

import socket
import statistics
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import atoll
from benchmarks.harness.benchmark import Round, Settings

LARGE_BYTES = 64_000_000
SOCKET = "blocking socket"
STAGES = (2, 4, 8, 16)


def copy_between(settings: Settings) -> Round:
    """64 MB from one island's device to the other's; the peer is `sendall` and `recv_into` over TCP on loopback."""
    repeats = settings.size(full=7, quick=3)
    move = _socket_copy() if settings.system == SOCKET else island_copy()

    def measure() -> dict[str, float]:
        return {"rate": LARGE_BYTES / 1e9 / statistics.median(move() for _ in range(repeats))}

    measure()
    return measure


def island_copy() -> Callable[[], float]:
    here, there = jax.devices()[:2]
    assert here.slice_index != there.slice_index
    values = np.arange(LARGE_BYTES // 4, dtype=np.float32)
    array = jax.device_put(values, here).block_until_ready()

    def move() -> float:
        started = time.perf_counter()
        moved = jax.device_put(array, there).block_until_ready()
        seconds = time.perf_counter() - started
        sample = np.asarray(moved[:: LARGE_BYTES // 64])
        np.testing.assert_array_equal(sample, values[:: LARGE_BYTES // 64])
        return seconds

    return move


def _socket_copy() -> Callable[[], float]:
    """Copy between two threads of one process, into allocated memory, as fast as a socket allows here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    return socket_copy(sender, receiver)


def socket_copy(sender: socket.socket, receiver: socket.socket) -> Callable[[], float]:
    """64 MB from one end of a connection to the other, which a thread reads; returns the seconds."""
    source = np.arange(LARGE_BYTES // 4, dtype=np.float32)
    target = np.ones(LARGE_BYTES, np.uint8)

    def receive() -> None:
        view, position = target.data, 0
        while position < LARGE_BYTES:
            position += receiver.recv_into(view[position:])

    def move() -> float:
        thread = threading.Thread(target=receive)
        started = time.perf_counter()
        thread.start()
        sender.sendall(source.data)
        thread.join()
        seconds = time.perf_counter() - started
        np.testing.assert_array_equal(target.view(np.float32)[::1000], source[::1000])
        return seconds

    return move


class Pipeline:
    """x = x + 1 on each island in turn, so many of them, as one program."""

    def __init__(self, stages: int) -> None:
        devices = jax.devices()
        add_one = jax.jit(lambda x: x + 1)

        @atoll.program
        def through(x: jax.Array) -> jax.Array:
            x = add_one(x)
            for device in devices[1:stages]:
                x = add_one(jax.device_put(x, device))
            return x

        self._stages = stages
        self._through = through
        self._zero = jax.device_put(jnp.zeros(8), devices[0])

    def run(self, passes: int) -> float:
        """Seconds for so many passes, all in flight at a time."""
        started = time.perf_counter()
        results = [self._through(self._zero) for _ in range(passes)]
        jax.block_until_ready(results)
        seconds = time.perf_counter() - started
        if any(float(np.asarray(x)[0]) != self._stages for x in results):
            raise ArithmeticError(f"{self._stages} stages made {[float(np.asarray(x)[0]) for x in results]} of zero")
        return seconds


def pipeline(settings: Settings) -> Round:
    """Passes a second."""
    passes = settings.size(full=20, quick=5)
    pipelines = {stages: Pipeline(stages) for stages in STAGES}
    for each in pipelines.values():
        each.run(2)
    return lambda: {f"stages_{stages}": passes / each.run(passes) for stages, each in pipelines.items()}
