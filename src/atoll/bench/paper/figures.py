"""All figures and tables, in the paper's order."""

from __future__ import annotations

from atoll.bench.paper import fig5, fig6, fig7, fig8

FIGURES = (fig5.FIGURE, fig6.FIGURE, fig7.FIGURE, fig8.FIGURE)
