"""A figure as a picture, with the paper's axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.record import BenchmarkRecord, RunRecord
from benchmarks.harness.statistics import Summary
from benchmarks.paper.figure import Axes

_MARKERS = "osv^D<>P*X"


def require_matplotlib() -> None:
    """Check that pictures can be drawn, so that a measurement of minutes does not end without one.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("figures are drawn with matplotlib: pip install 'atoll[bench]'") from error


def draw(run: RunRecord, title: str, axes: Axes, path: Path) -> None:
    """Lines of medians with their quartiles, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, plot = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for number, (label, line) in enumerate(lines(run.benchmarks, axes).items()):
        xs = [x for x, _ in line]
        middle = [summary.median for _, summary in line]
        below = [summary.median - summary.low for _, summary in line]
        above = [summary.high - summary.median for _, summary in line]
        plot.errorbar(xs, middle, (below, above), label=label, marker=_MARKERS[number % len(_MARKERS)], capsize=2)
    plot.set_title(title)
    plot.set_xlabel(axes.x_label)
    plot.set_ylabel(axes.y_label)
    if axes.log_x:
        plot.set_xscale("log", base=2)
        ticks = sorted({float(point.point[axes.x]) for point in run.benchmarks})
        plot.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if axes.log_y:
        plot.set_yscale("log")
    plot.grid(alpha=0.3)
    plot.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    pyplot.close(picture)


def lines(points: Sequence[BenchmarkRecord], axes: Axes) -> dict[str, list[tuple[float, Summary]]]:
    """By label: (x, what was measured there). A line for each contestant and metric, and each of `axes.split`."""
    found: dict[str, list[tuple[float, Summary]]] = {}
    for point in points:
        drawn = [record for record in point.metrics if record.name in axes.metrics]
        for record in drawn:
            for contestant, summary in record.summaries.items():
                parts = [contestant, *([record.title] if len(drawn) > 1 else [])]
                if axes.split:
                    parts.append(f"{point.point[axes.split]:g} {axes.split_unit}".strip())
                found.setdefault(", ".join(parts), []).append((float(point.point[axes.x]), summary))
    return found
