"""All figures and tables, in the paper's order."""

from __future__ import annotations

from atoll.bench.paper import fig5

FIGURES = (fig5.FIGURE,)
