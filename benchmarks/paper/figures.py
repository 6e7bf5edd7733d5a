"""All figures and tables, in the paper's order."""

from __future__ import annotations

from benchmarks.paper import (
    fig5,
    fig6,
    fig7,
    fig8,
    fig9,
    fig10,
    fig11,
    neighbours,
    pipelines,
    policies,
    table1_figure,
    table2,
    two_islands,
)

FIGURES = (
    fig5.FIGURE,
    fig6.FIGURE,
    fig7.FIGURE,
    fig8.FIGURE,
    fig9.FIGURE,
    fig11.FIGURE,
    policies.FIGURE,
    neighbours.FIGURE,
    table1_figure.FIGURE,
    table2.FIGURE,
    fig10.FIGURE,
    pipelines.FIGURE,
    two_islands.FIGURE,
)
