"""A cluster over time: what changed between two looks, and what is shown of it."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.state.tallies import BOUNDS
from atoll.telemetry.samples import Sample
from atoll.telemetry.snapshot import HistogramView
from atoll.telemetry.tables import (
    event_rows,
    headline,
    matching,
    session_rows,
    tenant_rows,
    time_text,
    transfer_rows,
    wait_rows,
)
from atoll.telemetry.watch import Watch, quantile


def body(**replies: Any) -> bytes:
    return msgspec.json.encode(replies)


def tenants(**seconds: float) -> list[dict[str, Any]]:
    return [{"name": name, "device_seconds": each} for name, each in seconds.items()]


def gangs(tenant: str, nbytes: int = 0) -> dict[str, Any]:
    return {
        "island": 0,
        "tenant": tenant,
        "transfers": [{"kind": "put", "count": 1, "bytes": nbytes}],
    }


def test_rates_are_those_of_the_controllers_clock():
    watch = Watch()
    for seconds, started, messages in ((10.0, 100, 1000), (12.0, 300, 1400)):
        watch.update(
            body(
                seconds=seconds,
                islands=[{"id": 0, "state": "ready", "started": started}],
                load={"messages_in": messages, "cpu_seconds": seconds / 10},
                gangs=[gangs("a", int(seconds * 1024))],
            ),
            now=seconds * 3,
        )
    assert (watch.rates.gangs, watch.rates.messages, watch.rates.bytes_moved) == (100.0, 200.0, 1024.0)
    assert round(watch.rates.controller, 6) == 0.1
    assert "100 gangs/s, 1.0 KiB/s moved" in headline(watch)


def test_shares_are_of_the_device_time_between_two_looks():
    watch = Watch()
    watch.update(body(seconds=1.0, tenants=tenants(a=10.0, b=0.0)), now=1.0)
    watch.update(body(seconds=2.0, tenants=tenants(a=10.3, b=0.1)), now=2.0)
    assert {name: round(share, 3) for name, share in watch.shares.items()} == {"a": 0.75, "b": 0.25}
    assert [(row.name, row.got) for row in tenant_rows(watch)] == [("a", 0.75), ("b", 0.25)]


def test_a_sample_is_of_the_time_between_two_looks():
    watch = Watch()
    hosts = [{"id": 0, "devices": [{"id": each, "memory_bytes": 100, "used_bytes": 25} for each in (0, 1)]}]
    islands = [{"id": 0, "state": "ready", "waiting": 3, "hosts": hosts}]
    for seconds, used in ((10.0, 1.0), (12.0, 4.0)):
        watch.update(body(seconds=seconds, islands=islands, tenants=tenants(a=used)), now=seconds + 100)
    assert list(watch.samples) == [Sample(110.0, 112.0, 0.75, 50, 200, 3)]
    watch.update(body(seconds=1.0, islands=islands), now=120.0)
    assert len(watch.samples) == 1, "another controller is not compared"


def test_a_filter_finds_rows_by_any_name_in_them():
    watch = Watch()
    sessions = [{"id": 3, "label": "train.py", "tenant": "Ana"}, {"id": 4, "label": "eval.py", "tenant": "ben"}]
    waits = [{"session": number, "island": 0, "reason": "order"} for number in (3, 4)]
    watch.update(body(sessions=sessions, waits=waits), now=0.0)
    for text, found in (("ana", [3]), ("EVAL", [4]), (".py", [3, 4]), (" ", [3, 4]), ("nobody", [])):
        assert [row.id for row in matching(session_rows(watch.snapshot), text)] == found
        assert [row.session for row in matching(wait_rows(watch.snapshot), text)] == found


def test_a_controller_that_started_anew_is_not_compared_with_the_one_before():
    watch = Watch()
    watch.update(body(seconds=100.0, islands=[{"id": 0, "state": "ready", "started": 500}]), now=1.0)
    watch.position = 77
    watch.update(body(seconds=1.0, islands=[{"id": 0, "state": "ready", "started": 5}]), now=2.0)
    assert (watch.rates.gangs, watch.position) == (0.0, 0)


def test_a_cluster_that_does_not_answer_is_shown_as_it_was_with_the_reason():
    watch = Watch()
    watch.update(body(seconds=1.0, topology="1x1x1"), now=1.0)
    watch.fail("no reply", now=91.0)
    assert (watch.snapshot.topology, watch.problem) == ("1x1x1", "no reply (this is the report of 2 min ago)")
    watch.update(body(seconds=2.0), now=2.0)
    assert watch.problem == ""


def test_events_have_the_time_of_the_wall_newest_first():
    watch = Watch()
    events = [{"number": n, "seconds": 10.0 * n, "kind": "failed", "text": "why", "island": n} for n in (1, 2)]
    events[1]["actor"] = "tenant ana, process 7"
    watch.update(body(seconds=50.0, events=events), now=1000.0)
    rows = event_rows(watch, now=1003.0, wall=80_000.0)
    assert [row.text for row in rows] == ["why (by tenant ana, process 7)", "why"]
    assert [(row.number, row.wall, row.where) for row in rows] == [
        (2, 79_967.0, "island 2"),
        (1, 79_957.0, "island 1"),
    ]


def test_a_quantile_is_the_bound_of_its_bucket():
    counts = [0] * (len(BOUNDS) + 1)
    counts[3], counts[-1] = 99, 1
    view = HistogramView(counts=tuple(counts))
    assert (quantile(view, 0.5), quantile(view, 0.99), quantile(view, 1.0)) == (BOUNDS[3], BOUNDS[3], BOUNDS[-1])
    assert quantile(HistogramView(), 0.5) == 0.0


def test_what_sessions_wait_for_stands_with_them():
    watch = Watch()
    wait = {"session": 3, "island": 1, "gangs": 4, "program": "f", "since": 8.0, "reason": "order", "text": "its turn"}
    watch.update(body(seconds=10.0, sessions=[{"id": 3, "label": "a.py"}, {"id": 4}], waits=[wait]), now=0.0)
    assert [row.waits_for for row in session_rows(watch.snapshot)] == ["its turn (4 on island 1)", ""]
    assert [(row.session, row.seconds) for row in wait_rows(watch.snapshot)] == [(3, 2.0)]


def test_transfers_are_summed_by_kind():
    watch = Watch()
    watch.update(body(gangs=[gangs("a", 1024), gangs("b", 1024)]), now=0.0)
    (row,) = transfer_rows(watch.snapshot)
    assert (row.kind, row.count, row.moved) == ("put (client to device)", 2, "2.0 KiB")


def test_times_have_units():
    assert [time_text(each) for each in (2.5e-5, 0.0025, 0.25, 30.0)] == ["25 us", "2.5 ms", "250 ms", "30 s"]
