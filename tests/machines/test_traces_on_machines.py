"""Tests of traces of hosts on several machines, whose clocks are independent."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import MachineCluster
from tests.machines.plugin import long, machines, make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

AHEAD = 86_400  # seconds

# On the controller's machine, and therefore by its clock.
SCRIPT = """
    import json, time
    import jax, jax.numpy as jnp, atoll

    near, far = jax.devices()
    step = jax.jit(lambda x: x @ x)
    x = jax.block_until_ready(step(jax.device_put(jnp.eye(64), near)))
    time.sleep(3)
    begun = time.monotonic_ns()
    with atoll.trace("/tmp/trace.json") as spans:
        for _ in range(5):
            x = jax.device_put(step(jax.device_put(step(x), far)), near)
        jax.block_until_ready(x)
        ended = time.monotonic_ns()
    other = json.load(open("/tmp/trace.json"))["otherData"]
    print("found", json.dumps([begun, ended, other, [(s.host, s.kind, s.node, s.started, s.ended) for s in spans]]))
"""


@long
def test_hosts_whose_clocks_are_a_day_apart_are_on_one_time_line_to_within_the_error(
    make_machines: Callable[..., Machines],  # noqa: F811
) -> None:
    """m1 has the clock of m0. The worker on m2 is a day ahead, in a separate time namespace."""
    bed = make_machines(3)
    with MachineCluster(bed, "2x1x1") as cluster:
        cluster.host("m1")
        cluster.host("m2", under=("unshare", "--time", "--monotonic", str(AHEAD)))
        cluster.is_up()
        script = cluster.script("m0", SCRIPT)
        _, line = script.line(lambda line: line.startswith("found "), seconds=120)
    begun, ended, other, spans = json.loads(line.removeprefix("found "))
    offsets = [host["offset_ns"] / 1e9 for host in other["hosts"]]
    errors = {host["host"]: host["error_ns"] for host in other["hosts"]}
    assert sorted(round(offset) for offset in offsets) == [-AHEAD, 0]
    assert max(errors.values()) < 100_000_000
    assert {host for host, *_ in spans} == set(errors) == {0, 1}
    for host, kind, _, start, end in spans:
        assert begun - errors[host] <= start <= end <= ended + errors[host], kind
    sent = {node: (host, start) for host, kind, node, start, _ in spans if kind == "send"}
    received = [(node, host, end) for host, kind, node, _, end in spans if kind == "receive"]
    assert len(received) >= 10
    for node, host, end in received:
        sender, start = sent[node]
        assert start - errors[sender] < end + errors[host], "nothing arrives before it is sent"
