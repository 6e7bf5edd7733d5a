"""Tests of the model of a cluster: it contains all that a controller reports, and tolerates missing parts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.tenant_settings import TenantSettings
from atoll.protocol import messages as m
from atoll.state.tenants import Tenant
from atoll.telemetry.report import report
from atoll.telemetry.snapshot import ControllerLoad, Snapshot, SnapshotStruct, read_snapshot
from tests.controller.play import Play
from tests.telemetry.reports import STORED, eventful_snapshot, readable


def busy() -> Play:
    """Return a play with work of all kinds: launches that run or wait, memory, transfers, events, and slices."""
    play = Play("2x1x2", device_memory=1000)
    play.with_call()
    play.array(10)
    play.now = 2.0
    play.proxy(play.session, m.Launch(1, (10,), (11,), ()))
    play.proxy(play.session, m.Launch(2, (), (12,), (99,)))
    play.flush()
    return play


def test_the_json_of_a_report_is_the_stored_one():
    """Users read this JSON. If a change is intended, `python -m tests.telemetry.reports` stores it."""
    assert readable(eventful_snapshot()) == STORED.read_text()


def test_a_report_sets_all_fields():
    """A field that the report forgets would have its default."""
    set_ones: set[str] = set()
    all_ones: set[str] = set()

    def visit(value: Any) -> None:
        if isinstance(value, SnapshotStruct | ControllerLoad):
            for each in msgspec.structs.fields(value):
                name, found = f"{type(value).__name__}.{each.name}", getattr(value, each.name)
                all_ones.add(name)
                default = each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
                if found != default:
                    set_ones.add(name)
                visit(found)
        elif isinstance(value, tuple):
            for each in value:
                visit(each)

    visit(eventful_snapshot())
    # The default of the viewer is an operator.
    unset = all_ones - set_ones - {"Snapshot.viewer", "Viewer.tenant", "Viewer.role"}
    assert unset == set(), (
        "the report forgets them, or `eventful_snapshot` in tests/telemetry/reports.py lacks an event"
    )


def test_a_snapshot_reads_what_a_report_says():
    snapshot = eventful_snapshot()
    assert read_snapshot(msgspec.json.encode(snapshot)) == snapshot


def test_what_a_report_does_not_say_has_a_default():
    assert read_snapshot(b"{}") == Snapshot()
    (session,) = read_snapshot(b'{"sessions": [{"id": 3, "label": "old.py"}]}').sessions
    assert (session.tenant, session.bytes) == ("default", 0)


def test_what_a_later_controller_says_beyond_is_left_out():
    assert read_snapshot(b'{"version": "9", "weather": "fine", "load": {"mood": 1}}') == Snapshot(version="9")


def test_what_is_no_report_is_refused():
    with pytest.raises(msgspec.MsgspecError):
        read_snapshot(b'{"islands": 3}')


def test_a_tenant_sees_its_own_and_no_other():
    play = busy()
    play.send(m.Launch(1, (10,), (13,), ()))
    tenant = Tenant(TenantSettings("other"))
    view = report(play.controller, tenant, 3.0)
    assert (view.viewer.tenant, view.viewer.role) == ("other", "user")
    assert (view.sessions, view.tenants, view.gangs, view.waits) == ((), (), (), ())
    assert {event.kind for event in view.events} == {"ready"}
    assert len(view.islands) == 2
