"""The alert rules for Prometheus that come with Atoll."""

from __future__ import annotations

from importlib.resources import files

RUNBOOK = "docs/operate/runbook.md"  # in the annotations of the file, before the section


def alert_rules(runbook: str = "") -> str:
    """Return the content of `alerts.yml`, with links to the page at the URL `runbook` if that is given."""
    text = (files("atoll.web") / "alerts.yml").read_text(encoding="utf-8")
    return text.replace(f'"{RUNBOOK}#', f'"{runbook}#') if runbook else text
