"""The rewards of `examples/grpo.py`: synchronous, one step off-policy, with a trainer that is killed, in one script.

Each form trains on a separate cluster. Runs of one form differ, because each worker draws other answers.
`docs/pictures/rewards.py` draws the result, and `write_page` puts a table of it on a page.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.harness.backends import ROOT
from benchmarks.harness.machine import Machine, describe
from benchmarks.harness.pages import write_between

RESULT = ROOT / "benchmarks" / "results" / "grpo.json"
PAGE = ROOT / "docs" / "design" / "named-arrays.md"
BEGIN, END = "<!-- rewards: begin (written by benchmarks.grpo) -->", "<!-- rewards: end -->"
_SCRIPT = ROOT / "examples" / "grpo.py"
_LAST = 20  # steps whose mean reward counts as the reward at the end
_SECONDS = 900.0
_GOOD = 0.9


class RewardCurve(msgspec.Struct, frozen=True):
    """The reward of each step of one run. `resumed` are the steps at which a trainer continued after a kill."""

    title: str
    rewards: list[float]
    seconds: float
    resumed: list[int] = []

    @property
    def last(self) -> float:
        """Return the mean reward of the last steps."""
        last = self.rewards[-_LAST:]
        return sum(last) / len(last)

    @property
    def good(self) -> int | None:
        """Return the first step whose reward is above 0.9, or None."""
        return next((step for step, reward in enumerate(self.rewards) if reward > _GOOD), None)


class RewardCurves(msgspec.Struct, frozen=True):
    started: str
    machine: Machine
    curves: list[RewardCurve]


def grpo(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 300,
    kill: Annotated[int, typer.Option(min=1, help="Step after which the trainer is killed.")] = 60,
    runs: Annotated[int, typer.Option(min=1, help="Runs of the forms with several scripts off-policy.")] = 4,
    output: Annotated[Path, typer.Option("--json", help="File for the result.")] = RESULT,
) -> None:
    """Train with examples/grpo.py in all its forms, and record the rewards."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    forms: list[tuple[str, int, Callable[[str], RewardCurve]]] = [
        ("one step off-policy", runs, lambda title: _scripts(title, steps, behind=1)),
        ("one step off-policy, trainer killed", runs, lambda title: _scripts(title, steps, behind=1, kill=kill)),
        ("on-policy", 1, lambda title: _scripts(title, steps, behind=0)),
        ("one script", 1, lambda title: _colocated(title, steps)),
    ]
    curves: list[RewardCurve] = []
    for title, count, train in forms:
        for _ in range(count):
            curves.append(each := train(title))
            change = f"{each.rewards[0]:.3f} -> {each.last:.3f}"
            print(f"{title:36} {change} in {each.seconds:.0f} s, resumed at {each.resumed}", flush=True)
            output.write_bytes(msgspec.json.encode(RewardCurves(started, describe(), curves)) + b"\n")


def table(result: RewardCurves) -> str:
    """Return the runs as a Markdown table, with one line per form."""
    forms: dict[str, list[RewardCurve]] = {}
    for each in result.curves:
        forms.setdefault(each.title, []).append(each)
    lines = [
        "| form | runs | trainer continued at step | first reward above 0.9, step | reward of the last 20 steps |",
        "|---|---:|---|---|---|",
    ]
    for title, found in forms.items():
        resumed = ", ".join(str(step) for each in found for step in each.resumed)
        good = ", ".join(str(each.good) for each in found)
        last = ", ".join(f"{each.last:.3f}" for each in found)
        lines.append(f"| {title} | {len(found)} | {resumed} | {good} | {last} |")
    return "\n".join(lines)


def write_page(page: Path = PAGE, result: Path = RESULT) -> None:
    """Put the table of a committed result between the markers of a page."""
    write_between(page, BEGIN, END, table(read(result)))


def read(path: Path = RESULT) -> RewardCurves:
    return msgspec.json.decode(path.read_bytes(), type=RewardCurves)


def _colocated(title: str, steps: int) -> RewardCurve:
    with tempfile.TemporaryDirectory(prefix="bench-grpo-") as directory:
        curve = Path(directory) / "curve.json"
        began = time.monotonic()
        _run(["colocated", "--steps", str(steps), "--curve", str(curve)], dict(os.environ)).wait(_SECONDS)
        return RewardCurve(title, _rounded(curve), time.monotonic() - began)


def _scripts(title: str, steps: int, behind: int, kill: int = 0) -> RewardCurve:
    """Train with a trainer and two workers. Kill the trainer after a step, and start it again."""
    import atoll

    with tempfile.TemporaryDirectory(prefix="bench-grpo-") as directory:
        curve = Path(directory) / "curve.json"
        cluster = atoll.connect(islands="2x1x4")
        environment = os.environ | {"JAX_PLATFORMS": "atoll", "ATOLL_ADDRESS": cluster.address}
        workers = [_run(["worker", "--number", str(number)], environment) for number in (0, 1)]
        train = ["trainer", "--steps", str(steps), "--behind", str(behind), "--curve", str(curve)]
        resumed = []
        began = time.monotonic()
        try:
            trainer = _run(train, environment)
            if kill:
                while len(_rewards(curve)) < kill:
                    assert trainer.poll() is None, "the trainer has ended"
                    time.sleep(0.05)
                trainer.send_signal(signal.SIGKILL)
                trainer.wait()
                trainer = subprocess.Popen(
                    [sys.executable, str(_SCRIPT), *train], env=environment, stdout=subprocess.PIPE, text=True
                )
                output, _ = trainer.communicate(timeout=_SECONDS)
                resumed.append(int(output.partition("resumed at step ")[2].split()[0]))
            assert trainer.wait(_SECONDS) == 0, "the trainer failed"
            seconds = time.monotonic() - began
        finally:
            for each in (*workers, trainer):
                each.kill()
                each.wait()
            cluster.close()
        return RewardCurve(title, _rounded(curve), seconds, resumed)


def _run(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(_SCRIPT), *arguments], env=environment, text=True)


def _rounded(curve: Path) -> list[float]:
    return [round(reward, 4) for reward in _rewards(curve)]


def _rewards(curve: Path) -> list[float]:
    """Return the rewards so far. The trainer may be writing them."""
    try:
        found = msgspec.json.decode(curve.read_bytes(), type=list[tuple[int, float]])
    except (OSError, msgspec.DecodeError):
        return []
    assert [step for step, _ in found] == list(range(len(found))), "steps are missing"
    return [reward for _, reward in found]
