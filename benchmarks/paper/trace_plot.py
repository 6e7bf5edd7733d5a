"""Pictures of traces, as figures 9 and 11 of the paper: who had which device when, one panel below another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.traces import bars_of

_COLOURS = "tab20"
_PANEL_INCHES = 1.5


def draw_traces(panels: Sequence[tuple[str, Path, float]], title: str, path: Path) -> None:
    """Each panel has a title, a trace file, and how many milliseconds of it are drawn. As a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    height = 0.7 + _PANEL_INCHES * len(panels)
    picture, plots = pyplot.subplots(len(panels), figsize=(8, height), layout="constrained", squeeze=False)
    colours = pyplot.get_cmap(_COLOURS).colors
    for (name, file, milliseconds), (plot,) in zip(panels, plots, strict=True):
        bars = bars_of(file)
        first = min(bar.end for bar in bars)  # by then all devices have begun
        rows = sorted({bar.row for bar in bars}, key=_numbers)
        sessions = sorted({(bar.client, bar.session) for bar in bars}, key=lambda each: (len(each[0]), each))
        if len({client for client, _ in sessions}) < len(sessions):  # processes of one script
            numbers = sorted(number for _, number in sessions)
            sessions = [(f"client {at}", number) for at, number in enumerate(numbers, start=1)]
        # Neighbours in the table of colours are shades of one another: every other one first.
        order = [*range(0, len(colours), 2), *range(1, len(colours), 2)]
        colour_of = {session: colours[order[at % len(order)]] for at, (_, session) in enumerate(sessions)}
        for at, row in enumerate(rows):
            here = [bar for bar in bars if bar.row == row]
            plot.broken_barh(
                [(bar.start - first, bar.end - bar.start) for bar in here],
                (at - 0.45, 0.9),
                facecolors=[colour_of[bar.session] for bar in here],
            )
        plot.set_xlim(0, milliseconds)
        plot.set_ylim(len(rows) - 0.5, -0.5)
        plot.set_yticks([0, len(rows) - 1] if len(rows) > 1 else [0], [rows[0], rows[-1]] if len(rows) > 1 else rows)
        plot.tick_params(labelsize=7)
        plot.set_title(name, fontsize=9)
        if len(sessions) <= len(colours):
            patches = [Patch(color=colour_of[number], label=client) for client, number in sessions]
            plot.legend(
                handles=patches, fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=1 + len(patches) // 9
            )
    plots[-1][0].set_xlabel("milliseconds", fontsize=8)
    picture.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)


def _numbers(row: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", row)]
