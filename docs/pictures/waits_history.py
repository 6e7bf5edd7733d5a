"""The picture of the history of waits, from `benchmarks/results/history.json`: one small chart per operation."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks import commit_history
from benchmarks.harness.statistics import number

_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_COLUMNS, _WIDTH, _HEIGHT, _GAP = 3, 270, 120, 16
_LEFT, _TOP, _BOTTOM = 12, 30, 24  # around the line of a chart


@dataclass(frozen=True)
class Chart:
    """The times of one operation at each commit, from zero up, with the value beside each point."""

    x: int
    y: int
    title: str
    values: tuple[float | None, ...]
    labels: tuple[str, ...]

    def svg(self) -> str:
        highest = max((value for value in self.values if value is not None), default=1.0)
        step = (_WIDTH - 2 * _LEFT - 34) / max(1, len(self.values) - 1)
        depth = _HEIGHT - _TOP - _BOTTOM - 14
        points = [
            (self.x + _LEFT + 14 + i * step, self.y + _TOP + 14 + depth * (1 - value / highest), value)
            for i, value in enumerate(self.values)
            if value is not None
        ]
        floor = self.y + _HEIGHT - _BOTTOM
        lines = [
            f'<rect x="{self.x}" y="{self.y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#f7f9fc" '
            'stroke="#cdd6e4"/>',
            _text(self.x + _LEFT, self.y + 18, self.title, 11, weight="bold"),
            f'<line x1="{self.x + _LEFT}" y1="{floor}" x2="{self.x + _WIDTH - _LEFT}" y2="{floor}" stroke="#999"/>',
            f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)}" fill="none" stroke="#41618f" '
            'stroke-width="2"/>',
        ]
        for x, y, value in points:
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#41618f"/>')
            lines.append(_text(x, y - 6, number(value), 10, anchor="middle"))
        for i, label in enumerate(self.labels):
            lines.append(_text(self.x + _LEFT + 14 + i * step, floor + 14, label, 9, anchor="middle", fill="#666"))
        return "\n".join(lines)


def _text(
    x: float, y: float, text: str, size: int, *, anchor: str = "start", fill: str = "#222", weight: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{bold} {_FONT}>'
        f"{escape(text)}</text>"
    )


def picture() -> tuple[int, int, tuple[Chart, ...]]:
    """Return width, height and charts."""
    runs = commit_history.read()
    labels = tuple(f"{each.commit[:7]}" for each in commit_history.commits(runs))
    charts = []
    for i, each in enumerate(commit_history.waits(runs)):
        row, column = divmod(i, _COLUMNS)
        x, y = _GAP + column * (_WIDTH + _GAP), _GAP + row * (_HEIGHT + _GAP)
        charts.append(Chart(x, y, f"{each.title}, {each.unit}", tuple(each.values), labels))
    rows = -(-len(charts) // _COLUMNS)
    return _GAP + _COLUMNS * (_WIDTH + _GAP), _GAP + rows * (_HEIGHT + _GAP), tuple(charts)
