"""`atoll.trace` and `atoll trace`: what ran where, by real processes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import RunScript


def test_a_trace_has_what_ran_in_its_block_and_nothing_else(run_script: RunScript, tmp_path: Path):
    path = tmp_path / "trace.json"
    script = f"""
import jax, jax.numpy as jnp, atoll
near, far = jax.devices()[0], jax.devices()[-1]
step = jax.jit(lambda x: x * 2)
x = step(jax.device_put(jnp.ones(4), near))
jax.block_until_ready(x)
with atoll.trace({str(path)!r}) as spans:
    assert spans == []
    jax.block_until_ready(jax.device_put(step(x), far))
print(sorted((span.island, span.kind) for span in spans))
"""
    out = run_script(script, islands="2x1x1").check().stdout
    for work in ("(0, 'call')", "(0, 'send')", "(1, 'receive')"):
        assert work in out
    assert "put" not in out, "that was before"
    rows = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(rows) == out.count("(")
    call = next(event for event in rows if event["cat"] == "call")
    receive = next(event for event in rows if event["cat"] == "receive")
    assert call["ts"] + call["dur"] <= receive["ts"] + receive["dur"]


def test_without_atoll_there_is_nothing_to_trace(run_script: RunScript):
    script = """
import atoll
try:
    with atoll.trace():
        pass
except atoll.errors.ClusterError as error:
    print(error)
"""
    assert "JAX_PLATFORMS=atoll" in run_script(script, env={"JAX_PLATFORMS": "cpu"}).check().stdout
