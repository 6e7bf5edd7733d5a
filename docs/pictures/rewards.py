"""The picture of the rewards of `examples/grpo.py`, from `benchmarks/results/grpo.json`."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks import grpo

_FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
_COLORS = ("#41618f", "#b4552d", "#4d8a4d", "#8a5aa0")
_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 20, 680, 280
_AVERAGED = 5  # steps per point


@dataclass(frozen=True)
class RewardChart:
    """The mean reward over each few steps, with one line per run and one color per form of the training."""

    curves: tuple[grpo.RewardCurve, ...]

    def _at(self, step: float, reward: float) -> tuple[float, float]:
        steps = max(len(each.rewards) for each in self.curves)
        return _LEFT + _WIDTH * step / steps, _TOP + _HEIGHT * (1 - reward)

    def svg(self) -> str:
        steps = max(len(each.rewards) for each in self.curves)
        parts = []
        for tenth in range(0, 11, 2):
            x, y = self._at(0, tenth / 10)
            parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(_text(x - 8, y + 4, f"{tenth / 10:.1f}", "end"))
        for step in range(0, steps + 1, max(1, steps // 4)):
            x, y = self._at(step, 0)
            parts.append(_text(x, y + 18, str(step), "middle"))
        parts.append(_text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 36, "step", "middle"))
        titles = list(dict.fromkeys(each.title for each in self.curves))
        colors = dict(zip(titles, _COLORS, strict=False))
        for each in self.curves:
            parts += self._line(each, colors[each.title])
        for number, (title, color) in enumerate(colors.items()):
            x, y = _LEFT + _WIDTH - 250, _TOP + _HEIGHT - 90 + 20 * number
            parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{color}" stroke-width="3"/>')
            parts.append(_text(x + 32, y + 4, title))
        return "\n".join(parts)

    def _line(self, curve: grpo.RewardCurve, color: str) -> list[str]:
        groups = [curve.rewards[first : first + _AVERAGED] for first in range(0, len(curve.rewards), _AVERAGED)]
        points = [self._at((i + 0.5) * _AVERAGED, sum(some) / len(some)) for i, some in enumerate(groups)]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts = [f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="1.2"/>']
        for step in curve.resumed:
            x, _ = self._at(step, 0)
            ends = f'x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _HEIGHT}"'
            parts.append(f'<line {ends} stroke="{color}" stroke-dasharray="4 3"/>')
        return parts


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {_FONT}>{escape(text)}</text>'


def picture() -> tuple[int, int, tuple[RewardChart, ...]]:
    """Return width, height and the chart."""
    return _LEFT + _WIDTH + 30, _TOP + _HEIGHT + 50, (RewardChart(tuple(grpo.read().curves)),)
