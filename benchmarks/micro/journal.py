"""Measure the cost of a journal: the controller's CPU time for a gang, with and without a journal in turn.

python -m benchmarks.micro.journal > benchmarks/results/journal.json

Three clusters of null devices: one without, one whose connections can be resumed, and one that also has a journal. A
round gives each of them the same gangs at a rate of a thousand per second. These figures depend on the other load of
the machine. Therefore the time to append the turns that were written is also measured separately.

`pauses` are measured with another cluster, whose client keeps more and more arrays. They are the times for which the
controller stands still to begin a snapshot.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from atoll.journal.files import FileCipher, JournalDirectory, new_salt
from atoll.journal.journal import recover
from atoll.journal.records import decode_events, encode_event, encode_turn, join_records
from atoll.journal.segment import JournalSegment
from atoll.operate.operator_requests import request_report
from atoll.session.bare import BareClient
from atoll.wire.address import parse_address
from benchmarks.harness.machine import describe
from benchmarks.paper.cluster import NullCluster
from benchmarks.paper.null_steps import Steps

ROUNDS = 7
GANGS = 2000  # of a round: so many that no snapshot makes the first turns go
ARRAYS = (1_000, 40_000, 100_000)  # that exist while pauses are measured
PAUSES = 3  # that are measured at each of these sizes
_STEP_SECONDS = 0.001
_ISLANDS = "1x2x2"
_KINDS: dict[str, tuple[float, bool]] = {"without": (0.0, False), "resumable": (60.0, False), "journal": (60.0, True)}


def measure() -> dict[str, Any]:
    """Microseconds of the controller's CPU time for a gang: of each round, by kind; and what appending takes."""
    directory = Path(tempfile.mkdtemp(prefix="atoll-bench-journal-"))
    clusters = {}
    for kind, (grace, has_journal) in _KINDS.items():
        clusters[kind] = NullCluster(
            _ISLANDS, grace_seconds=grace, journal=str(directory / "journal") if has_journal else ""
        )
    steps = {kind: each.run(Steps.prepare(each.client(), _STEP_SECONDS)) for kind, each in clusters.items()}
    rounds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    appending: dict[str, float] = {}
    try:
        for number in range(ROUNDS):
            for kind, cluster in sorted(clusters.items(), reverse=bool(number % 2)):
                before = cluster.cpu_seconds()["controller"]
                cluster.run(steps[kind].run(GANGS))
                rounds[kind].append(1e6 * (cluster.cpu_seconds()["controller"] - before) / GANGS)
            if not appending:
                appending = cost_of_appending(directory)
    finally:
        for cluster in clusters.values():
            cluster.engine.end()
        shutil.rmtree(directory, ignore_errors=True)
    return {"rounds": rounds, "appending": appending}


def pauses_of_snapshots() -> list[dict[str, Any]]:
    """Milliseconds for which the controller stood still to begin a snapshot, by the number of arrays.

    Gangs between two snapshots use CPU time, after which the next snapshot is due.
    """
    directory = Path(tempfile.mkdtemp(prefix="atoll-bench-journal-"))
    cluster = NullCluster("1x1x1", grace_seconds=60.0, journal=str(directory / "journal"))
    try:
        client = cluster.client()
        steps = cluster.run(Steps.prepare(client, 0.0))
        rows, kept = [], 0
        for arrays in ARRAYS:
            while kept < arrays:
                cluster.run(_keep(client, steps, min(1_000, arrays - kept)))
                kept += min(1_000, arrays - kept)
            pauses: set[float] = set()
            first = _journal_load(cluster)["snapshots"] + 1  # the next one may have begun with fewer arrays
            while len(pauses) < PAUSES:
                cluster.run(steps.run(500))
                load = _journal_load(cluster)
                if load["snapshots"] > first:
                    pauses.add(round(1e3 * load["pause"], 3))
            rows.append(
                {
                    "arrays": arrays,
                    "controller_MB": round(cluster.controller_memory() / 1e6),
                    "milliseconds": statistics.median(pauses),
                    "rounds": sorted(pauses),
                }
            )
        return rows
    finally:
        cluster.engine.end()
        shutil.rmtree(directory, ignore_errors=True)


async def _keep(client: BareClient, steps: Steps, arrays: int) -> None:
    handles = [handle for _ in range(arrays) for handle in await steps.begin()]
    await client.wait(handles)


def _journal_load(cluster: NullCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request_report(parse_address(cluster.address), ""))["load"]["journal"]
    return found


def cost_of_appending(directory: Path) -> dict[str, float]:
    """Return the cost of appending the turns of the journal that is being written there."""
    shutil.copytree(directory / "journal", directory / "copy")
    found = recover(JournalDirectory(directory / "copy"))
    assert found is not None
    turns = [[encode_event(event) for event in decode_events(turn)] for turn in found.turns]
    seconds = []
    for _ in range(ROUNDS):
        segment, cipher = JournalSegment(directory / "again", b"a header"), FileCipher(bytes(32), new_salt())
        began = time.process_time()
        for turn in turns:
            segment.append(encode_turn(cipher.seal(join_records(turn))))
        seconds.append(time.process_time() - began)
        segment.close()
    return {
        "turns_a_gang": round(len(turns) / GANGS, 2),
        "events_a_gang": round(sum(map(len, turns)) / GANGS, 2),
        "bytes_a_gang": round(sum(map(len, found.turns)) / GANGS),
        "microseconds_a_gang": round(1e6 * statistics.median(seconds) / GANGS, 2),
    }


def main() -> None:
    load = os.getloadavg()[0]
    measured = measure()
    rounds = measured["rounds"]
    more = {
        kind: statistics.median(100 * (one / other - 1) for one, other in zip(each, rounds["without"], strict=True))
        for kind, each in rounds.items()
    }
    found = {
        "commit": describe().commit,
        "load_before": load,
        "gangs": GANGS,
        "microseconds_a_gang": {kind: round(statistics.median(each), 1) for kind, each in rounds.items()},
        "more_percent": {kind: round(each, 1) for kind, each in more.items()},
        "appending": measured["appending"],
        "pauses": pauses_of_snapshots(),
        "rounds": {kind: [round(value, 1) for value in each] for kind, each in rounds.items()},
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
