"""All figures and tables, in the paper's order."""

from __future__ import annotations

from atoll.bench.paper import fig5, fig10, table1_figure, table2, two_islands

FIGURES = (fig5.FIGURE, table1_figure.FIGURE, table2.FIGURE, fig10.FIGURE, two_islands.FIGURE)
