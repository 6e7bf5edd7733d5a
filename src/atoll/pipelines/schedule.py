"""A pipeline's schedule as a table: the entries of each stage, in order. Pure.

A *stage* is one mesh; it runs one *part* of the model, or several (interleaved). An *entry* runs one part on one
micro-batch, forward or backward. `Schedule.check` determines whether a table is complete and can run, its bubble, and
the number of activations that each stage holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from atoll.errors import PipelineError
from atoll.pipelines import picture
from atoll.pipelines.entries import DEFAULT_TIMES, Check, Entry, Kind, Times

_IDLE = ("", ".", "-")


@dataclass(frozen=True)
class Schedule:
    """A table of entries: `rows[stage]` are the entries of a stage, in order."""

    rows: tuple[tuple[Entry, ...], ...]
    name: str = "custom"

    @classmethod
    def of(cls, rows: str | Iterable[str | Sequence[Any]], name: str = "custom") -> Schedule:
        """Make a custom table from one line of text or one sequence of entries per stage. For example::

            Schedule.of("0F0 0F1  .  0B0 0B1\\n .  1F0 1B0 1F1 1B1")

        Dots, which show idle time, are ignored. Raises PipelineError if an entry is invalid.
        """
        lines = [line for line in rows.splitlines() if line.strip()] if isinstance(rows, str) else list(rows)
        table = []
        for line in lines:
            cells = line.split() if isinstance(line, str) else line
            table.append(
                tuple(
                    cell if isinstance(cell, Entry) else Entry.parse(str(cell))
                    for cell in cells
                    if cell is not None and str(cell) not in _IDLE
                )
            )
        return cls(tuple(table), name)

    @property
    def stages(self) -> int:
        return len(self.rows)

    @cached_property
    def parts(self) -> int:
        return 1 + max((entry.part for row in self.rows for entry in row), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((entry.microbatch for row in self.rows for entry in row), default=-1)

    def stage_of(self, part: int) -> int:
        return next(stage for stage, row in enumerate(self.rows) if any(entry.part == part for entry in row))

    def __str__(self) -> str:
        return picture.text(self.name, self.rows, self.check())

    def plot(self, times: Times = DEFAULT_TIMES, ax: Any = None) -> Any:
        """Draw the table over time on matplotlib axes, and return them. `print(schedule)` draws it as text.

        Raises PipelineError if matplotlib, from the extra `plot`, is not installed.
        """
        return picture.plot(self.name, self.rows, self.check(times), ax)

    def plot_run(self, spans: Iterable[Any], ax: Any = None) -> Any:
        """Draw the run of one step from its spans, in the same style as `plot`. For example::

            _, (above, below) = plt.subplots(2)
            with atoll.trace() as spans:
                state, loss = jax.block_until_ready(pipe.step(state, batch))
            pipe.schedule.plot(ax=above)
            pipe.schedule.plot_run(spans, ax=below)

        Raises PipelineError if matplotlib is not installed, or if the spans contain no step with this table.
        """
        return picture.plot_run(self.name, self.rows, spans, ax)

    def check(self, times: Times = DEFAULT_TIMES) -> Check:
        """Simulate the table: each entry starts when its stage is free and its inputs have arrived.

        Raises PipelineError if an entry is missing or duplicate, or if entries wait for each other; the message then
        shows which entry waits for which.
        """
        where = self._complete()
        spans: dict[Entry, tuple[float, float]] = {}
        free = [0.0] * self.stages
        done = [0] * self.stages
        progress = True
        while progress:
            progress = False
            for stage, row in enumerate(self.rows):
                while done[stage] < len(row) and all(each in spans for each in self.needs(row[done[stage]])):
                    entry = row[done[stage]]
                    came = [spans[each][1] + times.transfer * (where[each][0] != stage) for each in self.needs(entry)]
                    start = max([free[stage], *came])
                    free[stage] = start + times.of(entry)
                    spans[entry] = start, free[stage]
                    done[stage] += 1
                    progress = True
        stuck = [row[done[stage]] for stage, row in enumerate(self.rows) if done[stage] < len(row)]
        if stuck:
            raise PipelineError(f"the schedule {self.name!r} cannot run: {self._circle(stuck[0], spans, done, where)}")
        length = max(free, default=0.0)
        busy = sum(end - start for start, end in spans.values())
        return Check(
            spans, length, 1 - busy / (length * self.stages) if length else 0.0, tuple(map(self._held, self.rows))
        )

    def needs(self, entry: Entry) -> tuple[Entry, ...]:
        """Return the entries whose results an entry takes."""
        part, kind, microbatch = entry.part, entry.kind, entry.microbatch
        if kind is Kind.FORWARD:
            return (Entry(part - 1, kind, microbatch),) if part else ()
        forward = Entry(part, Kind.FORWARD, microbatch)
        if kind is Kind.WEIGHTS:
            return (Entry(part, Kind.INPUT, microbatch),)
        if part == self.parts - 1:
            return (forward,)
        return forward, Entry(part + 1, self._backward_kind(part + 1, microbatch), microbatch)

    def _backward_kind(self, part: int, microbatch: int) -> Kind:
        """Return the kind of the entry that computes the gradients of the part's inputs."""
        whole = Entry(part, Kind.BACKWARD, microbatch)
        return Kind.BACKWARD if whole in self._all else Kind.INPUT

    @cached_property
    def _all(self) -> frozenset[Entry]:
        return frozenset(entry for row in self.rows for entry in row)

    def _complete(self) -> dict[Entry, tuple[int, int]]:
        """Return the stage and the position of each entry. Raise PipelineError if the table is incomplete."""
        where: dict[Entry, tuple[int, int]] = {}
        stage_of: dict[int, int] = {}
        for stage, row in enumerate(self.rows):
            for position, entry in enumerate(row):
                if entry in where:
                    raise PipelineError(
                        f"the schedule {self.name!r} contains {entry} twice: on stages {where[entry][0]} and {stage}"
                    )
                where[entry] = stage, position
                if stage_of.setdefault(entry.part, stage) != stage:
                    raise PipelineError(
                        f"the schedule {self.name!r} runs part {entry.part} on stages {stage_of[entry.part]} and "
                        f"{stage} ({entry}): a part and its parameters must be on one stage"
                    )
        for part in range(self.parts):
            for microbatch in range(self.microbatches):
                kinds = "".join(kind for kind in Kind if Entry(part, kind, microbatch) in where)
                if kinds not in ("FB", "FIW"):
                    has = " and ".join(f"{part}{kind}{microbatch}" for kind in kinds) or "nothing"
                    raise PipelineError(
                        f"the schedule {self.name!r} has {has} for part {part} and micro-batch {microbatch}; each part "
                        "must run each micro-batch once: F and B, or F, I and W"
                    )
        if not where:
            raise PipelineError(f"the schedule {self.name!r} is empty")
        return where

    def _circle(
        self,
        first: Entry,
        spans: Mapping[Entry, Any],
        done: Sequence[int],
        where: Mapping[Entry, tuple[int, int]],
    ) -> str:
        """Describe a cycle of entries that wait for each other."""
        steps: list[str] = []
        seen: set[Entry] = set()
        entry = first
        while entry not in seen:
            seen.add(entry)
            missing = next(each for each in self.needs(entry) if each not in spans)
            stage, _ = where[missing]
            ahead = self.rows[stage][done[stage]]
            behind = "" if ahead == missing else f", which is scheduled after {ahead}"
            steps.append(f"{entry} (stage {where[entry][0]}) waits for {missing} (stage {stage}){behind}")
            entry = ahead
        return "; ".join(steps)

    def _held(self, row: Sequence[Entry]) -> int:
        held = most = 0
        for entry in row:
            held += entry.kind is Kind.FORWARD
            most = max(most, held)
            held -= entry.kind in (Kind.BACKWARD, Kind.WEIGHTS)
        return most
