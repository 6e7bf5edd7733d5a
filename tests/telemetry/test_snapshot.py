"""The one model of a cluster: it has all that a controller reports, and does without what one does not."""

from __future__ import annotations

import json

import msgspec
import pytest

from atoll.cluster.tenant_settings import TenantSettings
from atoll.protocol import messages as m
from atoll.state.tenants import Tenant
from atoll.telemetry.report import report
from atoll.telemetry.snapshot import Snapshot, read_snapshot
from tests.controller.play import Play
from tests.telemetry.reports import encoded


def busy() -> Play:
    """Something of everything: launches that run and that wait, memory, transfers, events, slices."""
    play = Play("2x1x2", device_memory=1000)
    play.with_call()
    play.array(10)
    play.now = 2.0
    play.proxy(play.session, m.Launch(1, (10,), (11,), ()))
    play.proxy(play.session, m.Launch(2, (), (12,), (99,)))
    play.flush()
    return play


def test_a_snapshot_has_all_that_a_report_says():
    body = encoded(busy())
    said, understood = json.loads(body), json.loads(msgspec.json.encode(read_snapshot(body)))
    assert {key: understood[key] for key in said} == said


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
    play.say(m.Launch(1, (10,), (13,), ()))
    tenant = Tenant(TenantSettings("other"))
    view = read_snapshot(msgspec.json.encode(report(play.controller, tenant, 3.0)))
    assert (view.viewer.tenant, view.viewer.role) == ("other", "user")
    assert (view.sessions, view.tenants, view.gangs, view.waits) == ((), (), (), ())
    assert {event.kind for event in view.events} == {"ready"}
    assert len(view.islands) == 2
