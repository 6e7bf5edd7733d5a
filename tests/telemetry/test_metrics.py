"""Tests of converting a snapshot to Prometheus metrics."""

from __future__ import annotations

import shutil
import subprocess

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.telemetry.metrics import exposition
from atoll.telemetry.snapshot import read_snapshot
from tests.controller.play import Play
from tests.telemetry.reports import snapshot_of

PROMTOOL = shutil.which("promtool")


def played() -> Play:
    """Return the snapshot of a play with work of all kinds, and a loss."""
    play = Play("2x1x2", device_memory=1000)
    play.with_call()
    play.array(10)
    play.now = 1.0
    play.send(m.Launch(1, (10,), (11,), ()))
    play.event(e.Tick(2.0, e.Load(0.004, 0.5, 3, 10, 20, 100, 200)))
    play.lose(1, "closed")
    return play


def samples(play: Play) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    text, content_type = exposition(snapshot_of(play))
    assert content_type.startswith("text/plain")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def of(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def test_metrics_say_what_the_report_says():
    found = samples(played())
    gangs = of(island="0", tenant="default")
    assert found["atoll_gangs_running"][gangs] == 1
    assert found["atoll_gangs_waiting"][gangs] == 0
    assert found["atoll_gang_waiting_seconds_count"][gangs] == 2
    assert found["atoll_gang_waiting_seconds_bucket"][of(island="0", tenant="default", le="+Inf")] == 2
    assert found["atoll_gang_running_seconds_count"][gangs] == 1
    assert found["atoll_transfer_bytes_total"][of(island="0", tenant="default", kind="put")] == 8
    assert found["atoll_device_memory_used_bytes"][of(island="0", host="0", device="0", kind="null")] == 16
    assert found["atoll_device_memory_limit_bytes"][of(island="0", host="0", device="0", kind="null")] == 1000
    assert found["atoll_tenant_memory_bytes"][of(tenant="default")] == 16
    assert found["atoll_island_failures_total"] == {of(island="0"): 0, of(island="1"): 1}
    assert found["atoll_island_state"][of(island="1", state="restarting")] == 1
    assert found["atoll_controller_messages_total"] == {of(direction="in"): 10, of(direction="out"): 20}
    assert found["atoll_controller_loop_lag_seconds_sum"][()] == 0.004


def test_the_journal_the_standby_and_the_certificate_have_metrics_if_there_are_such():
    play = Play("1x1x1")
    absent = samples(play)
    assert not {"atoll_journal_complete", "atoll_certificate_expiry_seconds"} & absent.keys()
    journal = e.JournalLoad(False, 3, 12.5, 4096, "tls://two:7000", pause=0.004)
    play.event(e.Tick(2.0, e.Load(journal=journal, certificate_seconds=3600.0)))
    found = samples(play)
    names = ("journal_complete", "journal_snapshots_total", "journal_snapshot_age_seconds", "journal_bytes")
    assert [found[f"atoll_{name}"][()] for name in names] == [0, 3, 12.5, 4096]
    assert found["atoll_journal_snapshot_pause_seconds"][()] == 0.004
    assert found["atoll_standby_follows"][()] == 1
    assert not found.get("atoll_leader_lease_held")
    play.event(e.Tick(3.0, e.Load(journal=msgspec.structs.replace(journal, lease="a lease", holds_lease=True))))
    assert samples(play)["atoll_leader_lease_held"][()] == 1
    assert found["atoll_certificate_expiry_seconds"][()] == 3600


def test_quotas_have_metrics_for_those_that_are_set():
    text, _ = exposition(read_snapshot(msgspec.json.encode({"tenants": [{"name": "ana", "sessions": 3}]})))
    (family,) = [each for each in text_string_to_metric_families(text.decode()) if each.name == "atoll_tenant_quota"]
    assert [(each.labels, each.value) for each in family.samples] == [({"tenant": "ana", "quota": "sessions"}, 3.0)]


def test_each_quota_of_a_tenant_has_a_count_of_refusals_from_the_start() -> None:
    tenant = {"name": "ana", "sessions": 3, "disk": 5, "refusals": [["device memory", 2]]}
    text, _ = exposition(read_snapshot(msgspec.json.encode({"tenants": [tenant]})))
    found = [each for each in text_string_to_metric_families(text.decode()) if each.name == "atoll_tenant_refusals"]
    counts = {each.labels["quota"]: each.value for family in found for each in family.samples}
    assert counts == {"device memory": 2.0, "sessions": 0.0}


def test_buckets_add_up():
    found = samples(played())
    counts = [
        value
        for _, value in sorted(
            ((float(dict(labels)["le"]), value) for labels, value in found["atoll_gang_waiting_seconds_bucket"].items())
        )
    ]
    assert counts == sorted(counts)


def test_names_of_tenants_and_programs_are_escaped():
    body = msgspec.json.encode({"tenants": [{"name": 'a"b\\c\nd'}]})
    text, _ = exposition(read_snapshot(body))
    (family,) = [each for each in text_string_to_metric_families(text.decode()) if each.name == "atoll_sessions"]
    assert [sample.labels for sample in family.samples] == [{"tenant": 'a"b\\c\nd'}]


def test_a_scraper_that_asks_for_openmetrics_gets_it():
    text, content_type = exposition(snapshot_of(played()), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus has it)")
def test_promtool_has_nothing_to_say_of_them():
    assert PROMTOOL is not None
    text, _ = exposition(snapshot_of(played()))
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
