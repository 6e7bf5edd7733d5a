"""The dashboard for Grafana that comes with Atoll. `scripts/grafana_dashboard.py` writes its file."""

from __future__ import annotations

from importlib.resources import files


def grafana_dashboard() -> str:
    """Return the content of `dashboard.json`."""
    return (files("atoll.web") / "dashboard.json").read_text(encoding="utf-8")
