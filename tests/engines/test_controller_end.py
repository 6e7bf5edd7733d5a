"""Tests of what an engine does after the end of its controller, and of the reason that it gives."""

from __future__ import annotations

import signal

import pytest

from atoll.cluster.processes.leases import FAILED_STATUS
from atoll.controller_process.controller_options import CANNOT, CANNOT_RESTART, CHARGED, FAILED, RUNS, SUPERSEDED
from atoll.engines.controller_end import ControllerEnd, ControllerReports, NextStep

KILLED = -signal.SIGKILL
STANDBY = "tls://two:7000"


def reports(*lines: bytes) -> ControllerReports:
    found = ControllerReports()
    for line in lines:
        found.take(line)
    return found


@pytest.mark.parametrize("followed_by", ["", STANDBY])
@pytest.mark.parametrize("is_ending", [False, True])
@pytest.mark.parametrize("status", [0, 1, FAILED_STATUS, CANNOT_RESTART, SUPERSEDED, KILLED])
def test_the_next_step_depends_on_the_status_on_a_standby_and_on_who_ends_the_controller(
    status: int, is_ending: bool, followed_by: str
) -> None:
    if is_ending or status == 0:
        expected = NextStep.END
    elif status == SUPERSEDED or followed_by:
        expected = NextStep.SERVE_OTHER
    else:
        expected = NextStep.END if status == CANNOT_RESTART else NextStep.RESTART
    assert ControllerEnd(status, reports(), followed_by, is_ending).next_step is expected


@pytest.mark.parametrize(
    ("status", "lines", "followed_by", "text"),
    [
        (KILLED, (), "", "the controller ended: killed by SIGKILL"),
        (SUPERSEDED, (), "", "the controller ended: another controller has taken over"),
        (SUPERSEDED, (), STANDBY, f"the controller ended: the standby at {STANDBY} has taken over"),
        (CANNOT_RESTART, (CANNOT + b"protocol 1\n",), "", "the controller cannot run: protocol 1"),
        (FAILED_STATUS, (RUNS, FAILED + b"a bug\n"), "", "the controller failed: a bug"),
        (FAILED_STATUS, (CHARGED, FAILED + b"a bug\n"), "", "the controller failed: a bug (charged to a tenant)"),
        (FAILED_STATUS, (CANNOT + b"1\n", FAILED + b"a bug\n"), "", "the controller failed: a bug"),
    ],
)
def test_the_reason_is_the_bug_or_the_problem_that_was_reported_or_the_exit_status(
    status: int, lines: tuple[bytes, ...], followed_by: str, text: str
) -> None:
    assert ControllerEnd(status, reports(*lines), followed_by).text == text


def test_only_bugs_that_no_tenant_is_charged_for_count() -> None:
    assert ControllerEnd(FAILED_STATUS, reports(FAILED + b"a bug\n")).counts
    assert not ControllerEnd(FAILED_STATUS, reports(CHARGED, FAILED + b"a bug\n")).counts
    assert not ControllerEnd(KILLED, reports()).counts


def test_an_operator_asked_if_the_controller_ends_well_and_this_process_did_not_end_it() -> None:
    assert ControllerEnd(0, reports()).was_asked
    assert not ControllerEnd(0, reports(), is_ending=True).was_asked
    assert not ControllerEnd(0, reports(FAILED + b"a bug\n")).was_asked
    assert not ControllerEnd(KILLED, reports()).was_asked


def test_an_end_is_expected_without_a_bug_if_it_was_asked_for() -> None:
    assert ControllerEnd(0, reports()).is_expected
    assert ControllerEnd(KILLED, reports(), is_ending=True).is_expected
    assert not ControllerEnd(KILLED, reports()).is_expected
    assert not ControllerEnd(0, reports(FAILED + b"a bug\n")).is_expected
