"""One GPU beside stock JAX on the same one: dispatch, products, the training of a decoder, and transfers.

Each round starts a process for stock JAX and then one for Atoll, with nothing beside them. The decoder has 8 layers of
width 1024, computes in bfloat16 with parameters in float32, and takes 8 sequences of 1024 tokens per step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.harness.backends import ROOT
from benchmarks.harness.machine import describe
from benchmarks.harness.statistics import number, quartiles

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
SIDES = ("stock", "atoll")
_WIDTH, _LAYERS, _HEADS, _BATCH, _LENGTH, _WORDS = 1024, 8, 16, 8, 1024, 32000
_STEPS = 20
_CALLS = 2000
_WAITS = 200
_PRODUCT = 8192
_MIB = 1 << 20
_CHAINED, _WAITED = "calls per second, each of the last", "us of a call and a wait"  # as the result names them
_TITLES = {
    _CHAINED: "calls per second, each with the result of the previous one",
    _WAITED: "a call that the script waits for, us",
}


def gpu(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    platform: Annotated[str, typer.Option(help="As JAX names it.")] = "cuda",
    mebibytes: Annotated[int, typer.Option(min=1, help="The largest transfer.")] = 1024,
    training: Annotated[bool, typer.Option(help="Train the decoder, and multiply large matrices.")] = True,
) -> None:
    """Measure one accelerator with stock JAX and with Atoll, in turn."""
    environments: dict[str, Mapping[str, str]] = {
        "stock": {"JAX_PLATFORMS": "cpu" if platform == "cpu" else f"{platform},cpu"},
        "atoll": {"JAX_PLATFORMS": "atoll", "ATOLL_PLATFORM": platform, "ATOLL_ISLANDS": "1x1x1"},
    }
    found: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    device = ""
    for _ in range(rounds):
        for side in SIDES:
            command = [sys.executable, "-m", __name__, str(mebibytes), str(int(training))]
            environment = os.environ | environments[side] | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            process = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            measured = json.loads(process.stdout.splitlines()[-1])
            device = measured.pop("device")
            for name, value in measured.items():
                found[side].setdefault(name, []).append(value)
    write(RESULTS, device, msgspec.to_builtins(describe()), found)
    print(table(json.loads(RESULTS.read_text())))


def write(path: Path, device: str, machine: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"device": device, "machine": machine, "results": found}, indent=1) + "\n")


def table(record: Mapping[str, Any]) -> str:
    """Return a Markdown table of the medians, and of those of Atoll divided by those of stock JAX."""
    lines = ["| on one GPU | stock JAX | Atoll | Atoll / stock |", "| --- | --- | --- | --- |"]
    for name, samples in record["results"]["stock"].items():
        stock, atoll = (quartiles(each)[1] for each in (samples, record["results"]["atoll"][name]))
        lines.append(f"| {_TITLES.get(name, name)} | {number(stock)} | {number(atoll)} | {atoll / stock:.2f} |")
    return "\n".join(lines)


# ---- in a process of one side


def measure(mebibytes: int, training: bool) -> dict[str, Any]:
    import jax

    results: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    results |= _calls()
    if training:
        results |= _products()
        results |= _training()
    for size in sorted({64, mebibytes}):
        results |= _transfers(size)
    return results


def _median(run: Callable[[], None], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[times // 2]


def _calls() -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    add = jax.jit(lambda x: x + 1)
    start = add(jnp.float32(0))

    def chain() -> None:
        x = start
        for _ in range(_CALLS):
            x = add(x)
        x.block_until_ready()

    def wait() -> None:
        for _ in range(_WAITS):
            add(start).block_until_ready()

    chain()
    wait()
    return {
        _CHAINED: _CALLS / _median(chain),
        _WAITED: _median(wait) / _WAITS * 1e6,
    }


def _products() -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (_PRODUCT, _PRODUCT), jnp.bfloat16)
    multiply = jax.jit(lambda x: (x @ a) * jnp.bfloat16(0.01))

    def run() -> None:
        x = a
        for _ in range(_STEPS):
            x = multiply(x)
        x.block_until_ready()

    run()
    return {"bfloat16 products, TFLOP/s": _STEPS * 2 * _PRODUCT**3 / _median(run) / 1e12}


def _training() -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    keys = jax.random.split(jax.random.key(1), 5)
    shapes = {
        "words": (_WORDS, _WIDTH),
        "qkv": (_LAYERS, _WIDTH, 3 * _WIDTH),
        "out": (_LAYERS, _WIDTH, _WIDTH),
        "up": (_LAYERS, _WIDTH, 4 * _WIDTH),
        "down": (_LAYERS, 4 * _WIDTH, _WIDTH),
    }
    weights = {
        name: jax.random.normal(key, shape) * 0.02 for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    momentum = jax.tree.map(jnp.zeros_like, weights)

    def normalized(x: Any) -> Any:
        x = x.astype(jnp.float32)
        return ((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)

    def layer(x: Any, layers: Any) -> Any:
        layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layers)
        heads = (t.reshape(_BATCH, _LENGTH, _HEADS, -1) for t in jnp.split(normalized(x) @ layers["qkv"], 3, -1))
        x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ layers["out"]
        return x + jax.nn.gelu(normalized(x) @ layers["up"]) @ layers["down"], None

    def loss(weights: Any, tokens: Any) -> Any:
        x = weights["words"][tokens].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, {k: w for k, w in weights.items() if k != "words"})
        logits = (normalized(x) @ weights["words"].T.astype(jnp.bfloat16)).astype(jnp.float32)[:, :-1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()

    def step(weights: Any, momentum: Any, tokens: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(weights, tokens)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda w, m: w - 1e-2 * m, weights, momentum), momentum, value

    train = jax.jit(step, donate_argnums=(0, 1))
    random = np.random.default_rng(0)
    batches = [random.integers(0, _WORDS, (_BATCH, _LENGTH), np.int32) for _ in range(_STEPS)]
    value = None

    def run() -> None:
        nonlocal weights, momentum, value
        for tokens in batches:
            weights, momentum, value = train(weights, momentum, tokens)
        jax.block_until_ready(value)

    run()
    return {"training, steps per second": _STEPS / _median(run)}


def _transfers(mebibytes: int) -> dict[str, float]:
    import jax
    import numpy as np

    content = np.random.default_rng(0).integers(0, 255, mebibytes * _MIB, np.uint8)
    up, down = [], []
    for _ in range(3):
        started = time.perf_counter()
        there = jax.device_put(content)
        there.block_until_ready()
        up.append(time.perf_counter() - started)
        there = there + np.uint8(1)
        there.block_until_ready()
        started = time.perf_counter()
        back = np.asarray(there)
        down.append(time.perf_counter() - started)
        assert np.array_equal(back[::4097], content[::4097] + np.uint8(1))
    gib = mebibytes / 1024
    return {f"{mebibytes} MiB to the device, GiB/s": gib / min(up), f"{mebibytes} MiB back, GiB/s": gib / min(down)}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), bool(int(sys.argv[2])))))
