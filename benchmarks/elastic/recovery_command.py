"""`python -m benchmarks recoveries`: how long an elastic run computes no step after a loss, with a step compiled ahead.

The time begins when the run gets the error, so it contains no detection. Runs without and with the step compiled ahead
alternate, on one cluster of four islands.

`python -m benchmarks.elastic.recovery_command` writes the table of docs/design/recovery-times.md from the result.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.elastic.sides import DEVICES, AtollSide
from benchmarks.harness.backends import ROOT
from benchmarks.harness.machine import Machine
from benchmarks.harness.machine import describe as describe_machine
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.record import RESULTS

RESULT = RESULTS / "recoveries.json"
PAGE = ROOT / "docs" / "design" / "recovery-times.md"
BEGIN, END = "<!-- recoveries: begin (written by benchmarks.elastic) -->", "<!-- recoveries: end -->"
_PATIENCE = 300.0


def recoveries(
    pairs: Annotated[int, typer.Option(min=1, help="of a run without and a run with the step compiled ahead")] = 7,
    out: Annotated[Path, typer.Option(help="file of the result")] = RESULT,
) -> None:
    """Kill an island under elastic runs: the recovery with and without a step compiled ahead."""
    side = AtollSide(2 * pairs, random.randrange(1 << 20), module="benchmarks.elastic.recoveries")
    try:
        for number in range(2 * pairs):
            _wait_for(side, "ready", number)
            lost = number % DEVICES
            side.lose(lost)
            _wait_for(side, "recovery", number)
            side.give_back(lost)
        found = [each for each in side.lines.found if each["what"] == "recovery"]
    finally:
        side.close()
    result = {"machine": msgspec.to_builtins(describe_machine()), "recoveries": found}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    typer.echo(table(found))


def table(found: list[dict[str, Any]]) -> str:
    """Return a Markdown table of both kinds of runs."""
    rows = [
        "| step | runs | compilations after the loss | no step for, s (quickest to slowest) |",
        "|---|---:|---:|---:|",
    ]
    for title, is_ahead in (("compiled after the loss", False), ("compiled in advance", True)):
        some = [each for each in found if bool(each["ahead"]) == is_ahead]
        seconds = sorted(each["seconds"] for each in some)
        counts = sorted({each["compilations"] for each in some})
        span = f"{statistics.median(seconds):.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
        rows.append(f"| {title} | {len(some)} | {' or '.join(map(str, counts))} | {span} |")
    return "\n".join(rows)


def render(result: Path = RESULT) -> str:
    """Return the part of the page that a result has."""
    content = json.loads(result.read_bytes())
    machine = msgspec.convert(content["machine"], Machine)
    heading = f"{describe_commit(machine.commit)[0].upper()}{describe_commit(machine.commit)[1:]}; {machine}. Medians."
    return f"{heading}\n\n{table(content['recoveries'])}"


def _wait_for(side: AtollSide, what: str, run: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not any(each["what"] == what and each["run"] == run for each in list(side.lines.found)):
        if side.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"run {run} has not reported {what!r}: see standard error")
        time.sleep(0.05)


if __name__ == "__main__":
    write_between(PAGE, BEGIN, END, render())
