"""Draw SVG text: the time line, with one row per device and one color per session, and sparklines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from atoll.telemetry.samples import Sample
from atoll.telemetry.timeline import Row, stripes

PIXELS = 1000  # per row
MAX_ROWS = 64  # further devices are not drawn
_ROW = 22
_BAR = 16
_LEFT = 130
_TOP = 22
_LINES = 10  # of the grid
_MAX_TITLES = 50  # per row; further functions have the titles of their sessions
# Distinguishable with color blindness (after Okabe and Ito). Further sessions share these colors.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8f7a00", "#7f7f7f")


def colour_of(session: int) -> str:
    return COLOURS[(session - 1) % len(COLOURS)]


def time_line_svg(
    rows: list[Row], names: dict[int, str], device: Callable[[Row], str], now: float, window: float, ago: float = 0.0
) -> str:
    """Draw the `window` seconds that ended `ago` seconds before `now`.

    `names` maps sessions to their names, and `device(row)` returns the label of a row. The functions of a session have
    its color, and a title each, which browsers show where the pointer is.
    """
    end = now - ago
    shown = rows[:MAX_ROWS]
    height = _TOP + _ROW * len(shown) + 4
    parts = [
        f'<svg class="time-line" viewBox="0 0 {_LEFT + PIXELS + 10} {height}" width="100%" '
        'xmlns="http://www.w3.org/2000/svg" role="img" aria-label="gangs by device">'
    ]
    for line in range(_LINES + 1):
        x = _LEFT + PIXELS - round(line / _LINES * PIXELS)
        parts.append(f'<path d="M{x} {_TOP - 4}V{height}" class="grid"/>')
        if line % 2 == 0:
            seconds = ago + line / _LINES * window
            text = f"{seconds:g} s ago" if seconds else "now"
            parts.append(f'<text x="{x}" y="12" text-anchor="middle">{text}</text>')
    for number, row in enumerate(shown):
        top = _TOP + _ROW * number
        parts.append(f'<text x="4" y="{top + 13}">{escape(device(row))}</text>')
        parts.append(f'<path d="M{_LEFT} {top + _BAR + 2}h{PIXELS}" class="grid"/>')
        paths: dict[tuple[int, str], list[str]] = {}
        for stripe in stripes(row.bars, end - window, end, PIXELS):
            width = stripe.last - stripe.first
            key = stripe.session, stripe.name
            if key not in paths and len(paths) >= _MAX_TITLES:
                key = stripe.session, ""
            paths.setdefault(key, []).append(f"M{_LEFT + stripe.first} {top}h{width}v{_BAR}h-{width}z")
        for (session, name), drawn in paths.items():
            title = escape(names.get(session, f"session {session}") + (f": {name}" if name else ""))
            parts.append(f'<path d="{"".join(drawn)}" fill="{colour_of(session)}"><title>{title}</title></path>')
    parts.append("</svg>")
    return "".join(parts)


def legend_html(names: dict[int, str]) -> str:
    """Return the legend: the color of each session in `names`."""
    return "".join(
        f'<span class="legend"><i style="background:{colour_of(session)}"></i>{escape(name)}</span>'
        for session, name in sorted(names.items())
    )


_SPARK_WIDTH = 300
_SPARK_HEIGHT = 40


def sparkline_svg(samples: Iterable[Sample], value: Callable[[Sample], float], highest: float, title: str) -> str:
    """Draw `value` of each sample as an area over time. The picture's height is that of the value `highest`."""
    shown = list(samples)
    area = ""
    if shown:
        first = shown[0].first
        scale = _SPARK_WIDTH / max(shown[-1].last - first, 1e-9)
        previous = None
        for sample in shown:
            left, right = (round((at - first) * scale, 1) for at in (sample.first, sample.last))
            top = round(_SPARK_HEIGHT * (1 - min(1.0, value(sample) / highest if highest else 0.0)), 1)
            if previous is None or not previous.is_before(sample):
                area += f"{f'V{_SPARK_HEIGHT}Z' if previous else ''}M{left} {_SPARK_HEIGHT}"
            area += f"V{top}H{right}"
            previous = sample
        area += f"V{_SPARK_HEIGHT}Z"
    return (
        f'<svg class="sparkline" viewBox="0 0 {_SPARK_WIDTH} {_SPARK_HEIGHT}" preserveAspectRatio="none" '
        f'xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f'<path d="M0 {_SPARK_HEIGHT}H{_SPARK_WIDTH}" class="grid"/><path d="{area}" class="area"/></svg>'
    )


def tile_html(name: str, value: str, note: str, picture: str) -> str:
    """Return a tile with the current value of a quantity, and its sparkline `picture`."""
    return (
        f'<div class="tile" data-tile="{escape(name)}"><div>{escape(name)}</div><b>{escape(value)}</b> '
        f"<small>{escape(note)}</small>{picture}</div>"
    )
