"""Tests of when a standby takes over, with simulated times."""

from __future__ import annotations

import pytest

from atoll.controller_process.takeover import KNOWS_SECONDS, LEASE_SECONDS, RESUME_ATTEMPT_SECONDS, Takeover, next_term

HOSTS = (11, 12, 13)


def heard_at(now: float) -> Takeover:
    takeover = Takeover()
    takeover.received(now)
    return takeover


def test_more_than_half_of_the_hosts_decide():
    takeover = heard_at(100)
    takeover.lost()
    takeover.on_resume_attempt(100.1, 11)
    assert not takeover.is_due(100.1, HOSTS)
    takeover.on_resume_attempt(100.2, 11)
    assert not takeover.is_due(100.2, HOSTS)
    takeover.on_resume_attempt(100.3, 13)
    assert takeover.is_due(100.3, HOSTS)
    assert not takeover.is_due(100.3, (*HOSTS, 14)), "two of four are not more than half"
    assert not takeover.is_due(100.3, ()), "nobody decides"


def test_others_than_hosts_have_no_say():
    takeover = heard_at(100)
    takeover.lost()
    for proxy in (21, 22, 23):
        takeover.on_resume_attempt(100.1, proxy)
    assert not takeover.is_due(100.1, HOSTS)


def test_while_the_controller_is_heard_nobody_takes_over():
    takeover = heard_at(100)
    for host in HOSTS:
        takeover.on_resume_attempt(100.1, host)
    assert not takeover.is_due(100 + LEASE_SECONDS - 0.1, HOSTS)
    assert takeover.is_due(100 + LEASE_SECONDS, HOSTS)
    takeover.received(103)
    assert not takeover.is_due(103.1, HOSTS)


def test_a_host_that_came_once_and_not_again_is_with_the_controller():
    takeover = heard_at(100)
    takeover.lost()
    for host in HOSTS:
        takeover.on_resume_attempt(100.1, host)
    assert takeover.is_due(100.1 + RESUME_ATTEMPT_SECONDS, HOSTS)
    assert not takeover.is_due(100.2 + RESUME_ATTEMPT_SECONDS, HOSTS)


def test_what_a_standby_knows_is_of_use_for_a_while_only():
    takeover = heard_at(100)
    takeover.lost()
    for now, is_due in ((100 + KNOWS_SECONDS, True), (100.1 + KNOWS_SECONDS, False)):
        for host in HOSTS:
            takeover.on_resume_attempt(now, host)
        assert takeover.is_due(now, HOSTS) is is_due


def test_who_has_never_heard_a_controller_does_not_take_over():
    takeover = Takeover()
    for host in HOSTS:
        takeover.on_resume_attempt(1, host)
    assert not takeover.is_due(1, HOSTS)


@pytest.mark.parametrize(("earlier", "term"), [(1, 1000), (999, 1000), (1000, 2000), (1007, 2000)])
def test_a_term_is_beyond_all_that_the_controller_may_have_been_started_again_in(earlier, term):
    assert next_term(earlier) == term
