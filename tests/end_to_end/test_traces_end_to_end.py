"""Tests of `atoll.trace` and `atoll trace` with real processes: which programs ran on which devices, and when."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scripts import RunScript


def test_a_trace_has_what_ran_in_its_block_and_nothing_else(run_script: RunScript, tmp_path: Path):
    path = tmp_path / "trace.json"
    script = f"""
import jax, jax.numpy as jnp, atoll, time
near, far = jax.devices()[0], jax.devices()[-1]
step = jax.jit(lambda x: x * 2)
x = step(jax.device_put(jnp.ones(4), near))
jax.block_until_ready(x)
time.sleep(1.2)  # for the hosts' clocks to be read
with atoll.trace({str(path)!r}) as spans:
    assert spans == []
    jax.block_until_ready(jax.device_put(step(x), far))
print(sorted((span.island, span.kind) for span in spans))
"""
    out = run_script(script, islands="2x1x1").check().stdout
    for work in ("(0, 'call')", "(0, 'send')", "(1, 'receive')"):
        assert work in out
    assert "put" not in out, "that was before"
    trace = json.loads(path.read_text())
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ran = {event["cat"]: event for event in bars if "sequence" in event["args"]}
    assert sum("sequence" in event["args"] for event in bars) == out.count("(")
    call, send, receive = ran["call"], ran["send"], ran["receive"]
    assert send["args"]["bytes"] == receive["args"]["bytes"] == 16
    assert [event["ph"] for event in trace["traceEvents"] if event["name"] == "transfer"] == ["s", "f"]
    # The clocks of hosts and proxy, which has the client's call, are converted to the controller's clock.
    hosts, (session,) = trace["otherData"]["hosts"], trace["otherData"]["sessions"]
    assert [host["host"] for host in hosts] == [0, 1]
    errors = [each["error_ns"] / 1e3 for each in (*hosts, session)]
    assert min(errors) > 0
    request = next(event for event in bars if event["cat"] == "request" and event["name"] == "execute jit__lambda")
    assert request["ts"] < call["ts"] + call["dur"] + errors[0] + errors[2]
    assert send["ts"] < receive["ts"] + receive["dur"] + errors[0] + errors[1]
    assert trace["otherData"]["missing"] == []


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
