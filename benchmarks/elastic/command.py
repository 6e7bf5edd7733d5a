"""`python -m benchmarks elastic`: a training that loses two of four devices and gets them back, beside stock JAX.

Stock JAX is killed with the device, and started again at once from its last checkpoint (Orbax); nothing is added for a
scheduler that would have to notice. Each side runs the same timeline, one after the other.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.elastic import work
from benchmarks.elastic.sides import DEVICES, AtollSide, StockSide
from benchmarks.elastic.timeline import Phase, describe
from benchmarks.harness.machine import describe as describe_machine
from benchmarks.harness.machine import until_quiet
from benchmarks.harness.record import BUSY_CPUS

RESULT = Path(__file__).resolve().parents[1] / "results" / "elastic.json"
_WARM_STEPS = 20
_PATIENCE = 20.0  # for an island to be back, at most


def elastic(
    seconds: Annotated[int, typer.Option(min=3, help="of each phase")] = 20,
    megabytes: Annotated[int, typer.Option(min=1, help="of state")] = 16,
    out: Annotated[Path, typer.Option(help="where the result goes")] = RESULT,
) -> None:
    """Kill one of four islands, then another, and bring both back: what is computed meanwhile, beside stock JAX."""
    busy = until_quiet(BUSY_CPUS)
    atoll = AtollSide(max(3, seconds // 3), megabytes)
    try:
        phases = _play(atoll, seconds)
        found = {"atoll": _result(phases, atoll.lines.found)}
    finally:
        atoll.close()
    plain = {each["devices"]: each["rate"] for each in atoll.lines.found if each["what"] == "plain"}
    copies = [each for each in atoll.lines.found if each["what"] == "copies"]
    stock = StockSide(megabytes)
    try:
        found["stock JAX"] = _result(_play(stock, seconds), stock.lines.found)
    finally:
        stock.close()
    for phase in found["atoll"]["phases"]:
        rate = phase["steps_a_second"]
        phase["of_what_they_can_give"] = rate / plain[phase["devices"]] if rate else None
    result = {
        "machine": msgspec.to_builtins(describe_machine()),
        "busy_cpus_before": busy,
        "busy": busy > BUSY_CPUS,
        "phase_seconds": seconds,
        "megabytes": megabytes,
        "steps_between_copies": work.EVERY,
        "row_seconds": work.ROW_SECONDS,
        "plain_steps_a_second": plain,
        "steps_a_second_without_and_with_copies": [
            [each["rate"] for each in copies if bool(each["every"]) == with_copies] for with_copies in (False, True)
        ],
        "changes": [each for each in atoll.lines.found if each["what"] == "change"],
        **found,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    typer.echo(_table(result))


def _play(side: AtollSide | StockSide, seconds: float) -> list[Phase]:
    side.lines.wait_for_steps(_WARM_STEPS, side.process)
    phases: list[Phase] = []
    happenings = [("all there", DEVICES), ("one lost", 3), ("another lost", 2), ("one back", 3), ("both back", DEVICES)]
    for number, (happened, devices) in enumerate(happenings):
        began = time.time()
        if number in (1, 2):
            side.lose(DEVICES - number)
        elif number in (3, 4):
            side.give_back(number - 1)
        _wait_for(side, devices, began)
        typer.echo(f"{type(side).__name__}: {happened}, on {devices} after {time.time() - began:.1f} s", err=True)
        time.sleep(seconds)
        phases.append(Phase(happened, devices, began, time.time()))
    return phases


def _wait_for(side: AtollSide | StockSide, devices: int, since: float) -> None:
    """Until a step was computed on so many devices."""
    deadline = time.monotonic() + _PATIENCE + 100
    while not any(
        each["what"] == "step" and each["at"] > since and each["devices"] == devices for each in side.lines.found[-200:]
    ):
        if time.monotonic() > deadline or side.process.poll() is not None:
            raise RuntimeError(f"no step was computed on {devices} devices")
        time.sleep(0.05)


def _result(phases: list[Phase], lines: list[dict[str, Any]]) -> dict[str, Any]:
    described = [describe(phase, lines) for phase in phases]
    whole = phases[-1].ended - phases[0].began
    return {"phases": described, "seconds": whole, "steps": sum(each["steps"] for each in described)}


def _table(result: dict[str, Any]) -> str:
    rows = ["what happened    | devices | until on them, s | longest pause, s | steps/s | of plain | again"]
    for side in ("atoll", "stock JAX"):
        rows.append(f"{side}: {result[side]['steps']} steps in {result[side]['seconds']:.0f} s")
        for each in result[side]["phases"]:
            share = each.get("of_what_they_can_give")
            rows.append(
                f"{each['happened']:16} | {each['devices']:7} | {each['seconds_until_on_them']:16.2f} | "
                f"{each['longest_pause_seconds']:16.2f} | {each['steps_a_second'] or 0:7.2f} | "
                f"{f'{share:.3f}' if share else '':8} | {each['steps_again']:5}"
            )
    return "\n".join(rows)
