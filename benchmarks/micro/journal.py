"""What a journal costs the controller: processor time for a gang, with and without one, in turn.

    python -m benchmarks.micro.journal > benchmarks/results/journal.json

Three clusters of null devices: one without, one whose connections can be resumed, and one with a journal, too. A round
gives each of them the same gangs at a rate of a thousand a second.
"""

import json
import os
import shutil
import statistics
import tempfile

from benchmarks.harness.machine import describe
from benchmarks.paper.cluster import NullCluster
from benchmarks.paper.null_steps import Steps

ROUNDS = 7
GANGS = 4000
_STEP_SECONDS = 0.001
_ISLANDS = "1x2x2"
_KINDS: dict[str, tuple[float, bool]] = {"without": (0.0, False), "resumable": (60.0, False), "journal": (60.0, True)}


def measure() -> dict[str, list[float]]:
    """Microseconds of the controller's processor time for a gang: of each round, by kind."""
    folder = tempfile.mkdtemp(prefix="atoll-bench-journal-")
    clusters = {}
    for kind, (grace, has_journal) in _KINDS.items():
        clusters[kind] = NullCluster(_ISLANDS, grace_seconds=grace, journal=f"{folder}/{kind}" if has_journal else "")
    steps = {kind: each.run(Steps.prepare(each.client(), _STEP_SECONDS)) for kind, each in clusters.items()}
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    try:
        for _ in range(ROUNDS):
            for kind, cluster in clusters.items():
                before = cluster.processor_seconds()["controller"]
                cluster.run(steps[kind].run(GANGS))
                found[kind].append(1e6 * (cluster.processor_seconds()["controller"] - before) / GANGS)
    finally:
        for cluster in clusters.values():
            cluster.engine.end()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> None:
    load = os.getloadavg()[0]
    rounds = measure()
    without = rounds["without"]
    more = {
        kind: statistics.median(100 * (one / other - 1) for one, other in zip(rounds[kind], without, strict=True))
        for kind in rounds
    }
    medians = {kind: round(statistics.median(each), 1) for kind, each in rounds.items()}
    print(
        json.dumps(
            {
                "commit": describe().commit,
                "load_before": load,
                "gangs": GANGS,
                "microseconds_a_gang": medians,
                "more_percent": {kind: round(each, 1) for kind, each in more.items()},
                "rounds": {kind: [round(value, 1) for value in each] for kind, each in rounds.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
