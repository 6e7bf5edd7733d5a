"""Built-in schedules. Each is a function from numbers of stages and micro-batches to a table.

To add a schedule, write such a function and add it to `SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import PipelineError
from atoll.pipelines.entries import Entry, Kind
from atoll.pipelines.schedule import Schedule
from atoll.quantities import counted

F, B, INPUT, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHTS


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Run all forward entries, then all backward entries (Huang et al., 2019). Stages hold all micro-batches."""
    row = [(kind, each) for kind in (F, B) for each in range(microbatches)]
    return Schedule(tuple(tuple(Entry(s, kind, each) for kind, each in row) for s in range(stages)), "gpipe")


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Run backward as early as possible (PipeDream-Flush; Narayanan et al., 2021).

    Stage s of S holds S - s micro-batches.
    """
    rows = []
    for s in range(stages):
        ahead = min(microbatches, stages - s - 1)
        row = [Entry(s, F, each) for each in range(ahead)]
        for each in range(microbatches - ahead):
            row += [Entry(s, F, ahead + each), Entry(s, B, each)]
        row += [Entry(s, B, each) for each in range(microbatches - ahead, microbatches)]
        rows.append(tuple(row))
    return Schedule(tuple(rows), "1f1b")


def interleaved(stages: int, microbatches: int, virtual: int | None = None) -> Schedule:
    """Run 1F1B with `virtual` parts of the model per stage, round robin (Narayanan et al., 2021, section 2.2).

    The bubble is the bubble of 1F1B divided by `virtual`. Micro-batches run in groups of `stages`. The default is two
    parts per stage, or one part on a single stage, which has no bubble and is bitwise equal to plain JAX.
    """
    if virtual is None:
        virtual = 2 if stages > 1 else 1
    if microbatches % stages:
        raise PipelineError(
            f"the interleaved schedule requires a multiple of {stages} micro-batches, the number of stages, got "
            f"{microbatches}"
        )
    total = microbatches * virtual
    rows = []
    for s in range(stages):

        def entry(kind: Kind, number: int, s: int = s) -> Entry:
            group, within = divmod(number, stages * virtual)
            turn, each = divmod(within, stages)
            part = (turn if kind is F else virtual - 1 - turn) * stages + s
            return Entry(part, kind, group * stages + each)

        ahead = min(total, 2 * (stages - s - 1) + (virtual - 1) * stages)
        row = [entry(F, number) for number in range(ahead)]
        for number in range(total - ahead):
            row += [entry(F, ahead + number), entry(B, number)]
        row += [entry(B, number) for number in range(total - ahead, total)]
        rows.append(tuple(row))
    return Schedule(tuple(rows), "interleaved")


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Run 1F1B with split backward entries; the W entries fill the bubble (Qi et al., 2023, figure 3).

    The bubble is a third of 1F1B's if F, I and W take equally long. Every stage holds `stages` micro-batches, because
    later stages delay their W entries.
    """
    rows = []
    for s in range(stages):
        row: list[Entry] = []
        counts = {F: 0, INPUT: 0, W: 0}

        def add(*kinds: Kind, s: int = s, row: list[Entry] = row, counts: dict[Kind, int] = counts) -> None:
            for kind in kinds:
                if counts[kind] < microbatches:
                    row.append(Entry(s, kind, counts[kind]))
                    counts[kind] += 1

        add(*[F] * (stages - s), *[INPUT, F] * s)
        while counts[F] < microbatches:
            add(INPUT, W, F)
        while counts[W] < microbatches:
            add(INPUT, W)
        rows.append(tuple(row))
    return Schedule(tuple(rows), "zb-h1")


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
}


def schedule(name: str, stages: int, microbatches: int, **options: int) -> Schedule:
    """Return a built-in schedule: "gpipe", "1f1b", "interleaved" (option `virtual`: parts per stage) or "zb-h1".

    Raises PipelineError if the name, a number or an option is invalid.
    """
    if name not in SCHEDULES:
        raise PipelineError(f"unknown schedule {name!r}: use one of {', '.join(SCHEDULES)}, or a `Schedule` of yours")
    if stages < 1 or microbatches < 1:
        raise PipelineError(
            f"a schedule needs at least one stage and one micro-batch, got {counted(stages, 'stage')} and "
            f"{counted(microbatches, 'micro-batch')}"
        )
    if any(value < 1 for value in options.values()):
        raise PipelineError(f"the options of a schedule must be at least 1, got {options}")
    try:
        return SCHEDULES[name](stages, microbatches, **options)
    except TypeError:
        raise PipelineError(f"the schedule {name!r} has no options {sorted(options)}") from None
