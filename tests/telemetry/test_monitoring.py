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
from atoll.web.grafana_dashboard import grafana_dashboard
from tests.controller.play import Play
from tests.telemetry.reports import snapshot_of

ROOT = Path(__file__).parents[2]
RULES = yaml.load(alert_rules(), yaml.CSafeLoader)["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads(grafana_dashboard())
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


# Of 60 observations per minute, all are between the last two bounds.
_BUCKETS = [("0.1", 0), ("10", 0), ("60", 60), ("+Inf", 60)]
_HEALTHY = {
    'up{job="atoll"}': 1,
    'atoll_island_state{island="0",state="ready"}': 1,
    'atoll_island_state{island="0",state="restarting"}': 0,
    'atoll_island_state{island="0",state="drained"}': 0,
    'atoll_island_state{island="0",state="removed"}': 0,
    'atoll_island_waits_for_hosts{island="0"}': 0,
    'atoll_island_failures_total{island="0"}': 1,
    'atoll_events_total{kind="session refused"}': 4,
    'atoll_events_total{kind="late"}': 4,
    'atoll_events_total{kind="controller failed"}': 1,
    "atoll_journal_complete": 1,
    "atoll_journal_bytes": 4000,
    "atoll_standby_follows": 1,
    "atoll_leader_lease_held": 1,
    "atoll_certificate_expiry_seconds": 60000,
    'atoll_device_memory_used_bytes{island="0",device="1"}': 50,
    'atoll_device_memory_limit_bytes{island="0",device="1"}': 100,
}
# For each alert: the series of a cluster that has the problem, by minute, and the minute at which the alert fires.
FIRING: dict[str, tuple[dict[str, str], int]] = {
    "AtollDown": ({'up{job="atoll"}': "0x60"}, 2),
    "AtollIslandNotReady": ({'atoll_island_state{island="1",state="restarting"}': "1x60"}, 6),
    "AtollIslandHasNoHosts": (
        {'atoll_island_waits_for_hosts{island="1"}': "1x60", 'atoll_island_state{island="1",state="drained"}': "1x60"},
        6,
    ),
    "AtollIslandRemoved": ({'atoll_island_state{island="1",state="removed"}': "1x60"}, 2),
    "AtollIslandFailsOften": ({'atoll_island_failures_total{island="1"}': "0+1x60"}, 30),
    "AtollControllerFailed": ({'atoll_events_total{kind="controller failed"}': "0x10 1x60"}, 12),
    "AtollJournalIncomplete": ({"atoll_journal_complete": "0x60"}, 2),
    "AtollJournalGrows": ({"atoll_journal_bytes": "300000000x60"}, 11),
    "AtollStandbyLost": ({"atoll_standby_follows": "1x10 0x60"}, 20),
    "AtollLeaseNotHeld": ({"atoll_leader_lease_held": "0x60"}, 2),
    "AtollCertificateExpires": ({"atoll_certificate_expiry_seconds": "600x60"}, 11),
    "AtollControllerSlow": (
        {f'atoll_controller_loop_lag_seconds_bucket{{le="{le}"}}': f"0+{rate}x60" for le, rate in _BUCKETS},
        30,
    ),
    "AtollWorkLate": ({'atoll_events_total{kind="late"}': "0x10 1x60"}, 12),
    "AtollGangsWaitLong": (
        {f'atoll_gang_waiting_seconds_bucket{{tenant="a",le="{le}"}}': f"0+{rate}x90" for le, rate in _BUCKETS},
        60,
    ),
    "AtollDeviceMemoryFull": (
        {
            'atoll_device_memory_used_bytes{island="0",device="1"}': "99x60",
            'atoll_device_memory_limit_bytes{island="0",device="1"}': "100x60",
        },
        31,
    ),
    "AtollSessionsRefused": ({'atoll_events_total{kind="session refused"}': "0x10 1x60"}, 12),
}


def test_there_is_a_series_for_each_alert() -> None:
    assert FIRING.keys() == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_each_alert_fires_for_its_problem_and_not_for_a_healthy_cluster(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    (tmp_path / "alerts.yml").write_text(alert_rules())
    tests = []
    for rule in RULES:
        series, minute = FIRING[rule["alert"]]
        names = [{"series": name, "values": values} for name, values in series.items()]
        firing = f"count by (alertname) (ALERTS{{alertname='{rule['alert']}',alertstate='firing'}})"
        problem = {
            "expr": firing,
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": f'{{alertname="{rule["alert"]}"}}', "value": 1}],
        }
        tests.append({"interval": "1m", "input_series": names, "promql_expr_test": [problem]})
    healthy = [{"series": name, "values": f"{value}x90"} for name, value in _HEALTHY.items()]
    none = {"expr": "ALERTS", "eval_time": "85m", "exp_samples": []}
    tests.append({"interval": "1m", "input_series": healthy, "promql_expr_test": [none]})
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    ran = subprocess.run([PROMTOOL, "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
