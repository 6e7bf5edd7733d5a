"""The schedules that Atoll has. Each is a function from numbers of stages and micro-batches to a table.

To add one: write such a function, and name it in `SCHEDULES`.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import PipelineError
from atoll.pipelines.entries import Entry, Kind
from atoll.pipelines.schedule import Schedule

F, B, INPUT, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHTS


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward entries, then all backward ones (Huang et al., 2019). Stages hold all micro-batches."""
    row = [(kind, each) for kind in (F, B) for each in range(microbatches)]
    return Schedule(tuple(tuple(Entry(s, kind, each) for kind, each in row) for s in range(stages)), "gpipe")


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Backward as early as it can be (PipeDream-Flush; Narayanan et al., 2021). Stage s holds S - s micro-batches."""
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
    """1F1B with `virtual` parts of the model on each stage, round robin (Narayanan et al., 2021, section 2.2).

    The bubble is that of 1F1B over `virtual`. Micro-batches go in groups of as many as there are stages. Where nobody
    says, there are two parts, and one on a single stage: it has no bubble, and computes the bits of plain JAX.
    """
    if virtual is None:
        virtual = 2 if stages > 1 else 1
    if microbatches % stages:
        raise PipelineError(
            f"interleaved takes micro-batches in groups of as many as there are stages: {microbatches} is no multiple "
            f"of {stages}"
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
    """1F1B whose backward entries are split; those for weights fill the bubble (Qi et al., 2023, figure 3).

    A third of 1F1B's bubble where F, I and W take equally long. Every stage holds as many micro-batches as there are
    stages: the later ones put their W off by that.
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
    """One of the tables by its name: "gpipe", "1f1b", "interleaved" (option `virtual`: parts a stage) or "zb-h1".

    Raises PipelineError.
    """
    if name not in SCHEDULES:
        raise PipelineError(f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}, and tables of your own")
    if stages < 1 or microbatches < 1:
        raise PipelineError(f"a schedule for {stages} stages and {microbatches} micro-batches")
    if any(value < 1 for value in options.values()):
        raise PipelineError(f"a schedule with {options}")
    try:
        return SCHEDULES[name](stages, microbatches, **options)
    except TypeError:
        raise PipelineError(f"the schedule {name!r} has no options {sorted(options)}") from None
