"""Issue thirty thousand collectives before waiting for one of them.

    JAX_PLATFORMS=atoll python examples/collectives.py

Each call is an AllReduce over all devices. Stock JAX with 8 forced CPU devices on a small machine ends with an error
after a few hundred calls: the threads of its devices start them in different orders, and wait for one another without
end. Atoll's controller gives all devices one order, and limits the number of calls in flight.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import track


def main() -> None:
    parser = argparse.ArgumentParser(description="Issue many AllReduces over all devices, and check their results.")
    parser.add_argument("--calls", type=int, default=30_000, help="how many (default: 30000)")
    calls: int = parser.parse_args().calls

    mesh = Mesh(np.array(jax.devices()), ("x",))
    spread = NamedSharding(mesh, PartitionSpec("x"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec())
    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "x")

    inputs = [jax.device_put(np.arange(mesh.size, dtype=np.float32) + i, spread) for i in range(8)]
    expected = [float(np.sum(np.arange(mesh.size) + i)) for i in range(8)]

    started = time.perf_counter()
    quiet = not sys.stderr.isatty()
    numbers = track(range(calls), description="issued", disable=quiet)
    results = [total(inputs[i % 8]) for i in numbers]
    issued = time.perf_counter() - started
    jax.block_until_ready(results)
    seconds = time.perf_counter() - started

    wrong = sum(float(np.asarray(results[i])[0]) != expected[i % 8] for i in range(0, calls, max(1, calls // 100)))
    print(
        f"{calls} AllReduces over {mesh.size} devices: issued in {issued:.1f} s, done in {seconds:.1f} s, "
        f"{calls / seconds:.0f}/s, {'all right' if not wrong else f'{wrong} WRONG'}"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
