"""Connections to the controller outlive their sockets: what runs notices nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StartCluster

CUT_SOCKETS = Path(__file__).with_name("cut_sockets")
CUTS = 20  # of each kind of process, at least


def train(steps: int) -> list[bytes]:
    """A model in two parts, each on an island of its own; the losses."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    first, second = (next(d for d in jax.devices() if d.slice_index == island) for island in (0, 1))
    forward = jax.jit(lambda w, x: jnp.tanh(x @ w))
    backward = jax.jit(jax.value_and_grad(lambda v, h: jnp.mean(jnp.sin(h @ v) ** 2)))
    w = jax.device_put(np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), first)
    v = jax.device_put(np.linspace(1, -1, 64, dtype=np.float32).reshape(8, 8), second)
    losses = []
    for step in range(steps):
        x = jax.device_put(np.full((4, 8), step % 7, dtype=np.float32), first)
        loss, gradient = backward(v, jax.device_put(forward(w, x), second))
        v = v - 0.1 * gradient
        losses.append(loss)
    return [np.asarray(loss).tobytes() for loss in losses]


def train_until(path: str, cuts: int, steps: int) -> tuple[int, list[list[bytes]]]:
    """Trains again and again until there were so many cuts of each of five connections. Each training's losses."""
    from collections import Counter
    from pathlib import Path

    Path(path).touch()
    runs = []
    while True:
        runs.append(train(steps))
        counts = Counter(Path(path).read_text().splitlines())
        if len(counts) >= 4 and min(counts.values()) >= cuts:
            Path(path).unlink()
            return sum(counts.values()), runs


@pytest.mark.parametrize("listen", ["", "127.0.0.1:0"], ids=["unix", "tcp"])
def test_sockets_are_cut_and_losses_are_bit_for_bit_those_of_an_undisturbed_run(
    start_cluster: StartCluster, start_python: StartPython, tmp_path: Path, listen: str
) -> None:
    cuts = tmp_path / "cuts"
    environment = {"PYTHONPATH": f"{CUT_SOCKETS}:{__import__('os').environ['PYTHONPATH']}", "ATOLL_CUTS": str(cuts)}
    cluster = start_cluster(environment, islands="2x1x1", grace_seconds=30.0, listen=listen)
    python = start_python(ATOLL_ADDRESS=cluster.address)
    undisturbed = python.call(train, 60)
    count, runs = python.call(train_until, str(cuts), CUTS, 60)
    assert all(run == undisturbed for run in runs)
    assert count >= 4 * CUTS
