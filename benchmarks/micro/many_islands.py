"""(ah): a computation over 512 null islands of one host, beside one island of 512 hosts."""

from __future__ import annotations

import time

from benchmarks.harness.benchmark import Round, Settings
from benchmarks.paper.cluster import NullCluster, costs
from benchmarks.paper.null_steps import Steps

ISLANDS = "atoll, 512 null islands"
_SECONDS = 0.035  # the paper's shortest computation that hides the controller of 512 hosts
_CHAIN = 12  # nodes of a program that a dispatch unit may have
_FILL = 8  # calls ahead of the clock


def computation(settings: Settings) -> Round:
    hosts = settings.size(512, 32)
    began = time.perf_counter()
    cluster = NullCluster(f"{hosts}x1x1" if settings.system == ISLANDS else f"1x{hosts}x1")
    start = time.perf_counter() - began
    client = cluster.client()
    calls = settings.size(40, 16)

    def measured(nodes: int, seconds: float) -> tuple[float, float]:
        """Return the controller's CPU time per computation in ms, and the rate relative to that of the devices."""
        steps = cluster.run(Steps.prepare(client, seconds, nodes))
        cluster.run(steps.run(_FILL))
        elapsed = 0.0

        def work() -> None:
            nonlocal elapsed
            elapsed = cluster.run(steps.run(calls, _FILL))

        spent = costs(cluster, (calls + _FILL) * nodes, 1, work)["controller_us"] / 1e3
        return spent, calls * nodes * seconds / elapsed

    def measure() -> dict[str, float]:
        controller, parity = measured(1, _SECONDS)
        chained, _ = measured(_CHAIN, 1e-4)
        return {"start": start, "controller": controller, "parity": parity, "chained": chained}

    return measure
