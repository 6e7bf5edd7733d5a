"""The alert rules and the dashboard name metrics and labels that a cluster has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from atoll.protocol import events as e
from atoll.telemetry.history import KINDS
from atoll.telemetry.metrics import metrics_of
from atoll.web.alert_rules import RUNBOOK, alert_rules
from tests.controller.play import Play
from tests.telemetry.reports import snapshot_of

ROOT = Path(__file__).parents[2]
RULES = yaml.load(alert_rules(), yaml.CSafeLoader)["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "monitoring" / "dashboard.json").read_text())
PROMTOOL = shutil.which("promtool")
_NAME = re.compile(r"\batoll_[a-z_]+")
_SELECTOR = re.compile(r"(atoll_[a-z_]+)\{([^}]*)\}")


def queries() -> list[str]:
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [*(rule["expr"] for rule in RULES), *(target["expr"] for target in targets)]


def labels_by_sample() -> dict[str, set[str]]:
    play = Play("1x1x1", device_memory=1000)
    play.with_call()
    play.array(10)
    journal = e.JournalLoad(True, 1, 2.0, 3, lease="a lease")
    play.event(e.Tick(2.0, e.Load(0.004, journal=journal, certificate_seconds=100.0)))
    found: dict[str, set[str]] = {}
    for family in metrics_of(msgspec.convert(msgspec.to_builtins(snapshot_of(play)), type(snapshot_of(play)))):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("query", queries())
def test_a_query_names_metrics_and_labels_that_exist(query: str):
    known = labels_by_sample()
    names = set(_NAME.findall(query))
    assert names <= known.keys() | {"atoll"} or query.startswith("up")
    for name, selector in _SELECTOR.findall(query):
        labels = set(re.findall(r"([a-z]+)\s*(?:=~|=|!=)", selector)) - {"instance", "job"}
        assert labels <= known[name], name


def test_the_kinds_of_events_in_queries_exist():
    kinds = {kind for query in queries() for each in re.findall(r'kind=~?"([^"]*)"', query) for kind in each.split("|")}
    assert kinds
    assert kinds <= set(KINDS)


def test_an_event_that_never_happened_has_a_sample_so_that_its_first_one_is_an_increase():
    events = next(each for each in metrics_of(snapshot_of(Play("1x1x1"))) if each.name == "atoll_events")
    assert {sample.labels["kind"] for sample in events.samples} >= set(KINDS)


def test_each_alert_has_a_severity_and_an_entry_in_the_runbook():
    runbook = (ROOT / "docs" / "operate" / "runbook.md").read_text()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower().lstrip("# ")).replace(" ", "-")
        for line in runbook.splitlines()
        if line.startswith("## ")
    }
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (file, anchor in headings) == (RUNBOOK, True), anchor


def test_the_alerts_link_to_the_page_that_is_given():
    rules = yaml.safe_load(alert_rules("https://wiki.example/runbook"))["groups"][0]["rules"]
    links = [rule["annotations"]["runbook_url"] for rule in rules]
    assert all(link.startswith("https://wiki.example/runbook#") for link in links)
    assert links[0].endswith("#the-cluster-does-not-answer")


def test_the_dashboard_is_what_its_script_writes():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from grafana_dashboard import dashboard
    finally:
        sys.path.pop(0)
    assert dashboard() == DASHBOARD


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules(tmp_path: Path):
    assert PROMTOOL is not None
    file = tmp_path / "alerts.yml"
    file.write_text(alert_rules())
    subprocess.run([PROMTOOL, "check", "rules", str(file)], check=True)
