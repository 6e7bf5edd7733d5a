"""(g), (h): arrays from island to island, and a pipeline whose stages are each on an island of its own."""

import socket
import statistics
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import atoll
from atoll.bench.harness.benchmark import Round, Settings

LARGE_BYTES = 64_000_000
SOCKET = "blocking socket"
STAGES = (2, 4, 8, 16)


def copy_between(settings: Settings) -> Round:
    """64 MB from one island's device to the other's; the peer is `sendall` and `recv_into` over TCP on loopback."""
    repeats = settings.size(full=7, quick=3)
    move = _socket_copy() if settings.backend == SOCKET else _island_copy()

    def measure() -> dict[str, float]:
        return {"rate": LARGE_BYTES / 1e9 / statistics.median(move() for _ in range(repeats))}

    measure()
    return measure


def _island_copy() -> Callable[[], float]:
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
    """Between two threads of one process, into memory that is there already: as fast as a socket gets here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
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


def pipeline(settings: Settings) -> Round:
    """x = x + 1 on each island in turn, S of them, as one program; several passes in flight: passes a second."""
    passes = settings.size(full=20, quick=5)
    devices = jax.devices()
    add_one = jax.jit(lambda x: x + 1)
    zero = jax.device_put(jnp.zeros(8), devices[0])

    def program_of(stages: int) -> Callable[[jax.Array], jax.Array]:
        @atoll.program
        def through(x: jax.Array) -> jax.Array:
            x = add_one(x)
            for device in devices[1:stages]:
                x = add_one(jax.device_put(x, device))
            return x

        return through

    programs = {stages: program_of(stages) for stages in STAGES}

    def run(stages: int, passes: int) -> float:
        started = time.perf_counter()
        results = [programs[stages](zero) for _ in range(passes)]
        jax.block_until_ready(results)
        seconds = time.perf_counter() - started
        if any(float(np.asarray(x)[0]) != stages for x in results):
            raise ArithmeticError(f"{stages} stages made {[float(np.asarray(x)[0]) for x in results]} of zero")
        return seconds

    def measure() -> dict[str, float]:
        return {f"stages_{stages}": passes / run(stages, passes) for stages in STAGES}

    for stages in STAGES:
        run(stages, 2)
    return measure
