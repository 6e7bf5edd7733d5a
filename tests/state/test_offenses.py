"""The tenants that are charged for a crash, and the lengths of their suspensions."""

from __future__ import annotations

import pytest

from atoll.cluster.tenant_settings import TenantSettings
from atoll.state.offenses import (
    FIRST_SUSPENSION_SECONDS,
    FORGET_SECONDS,
    LONGEST_SUSPENSION_SECONDS,
    MAX_CRASHES,
    SPAN_SECONDS,
    Offenses,
    Running,
    TenantOffenses,
    blame,
)
from atoll.state.tenants import Tenant

ANA, BEN = (Tenant(TenantSettings(name)) for name in ("ana", "ben"))


def test_a_tenant_is_suspended_at_the_last_of_several_crashes_within_a_minute():
    offenses = TenantOffenses()
    running = [Running(ANA, False)]
    for each in range(MAX_CRASHES - 1):
        assert offenses.crashed(float(each), running, is_sure=True) == []
    assert offenses.launch_problem(ANA, 5.0) is None
    assert offenses.crashed(5.0, running, is_sure=True) == [ANA]
    problem = offenses.launch_problem(ANA, 10.5)
    assert problem is not None
    assert f"tenant ana cannot launch programs for another {FIRST_SUSPENSION_SECONDS - 5:.0f} s" in problem.message
    assert offenses.compile_problem(ANA, 10.5) == problem
    assert offenses.launch_problem(BEN, 10.5) is None
    assert offenses.launch_problem(ANA, 5.0 + FIRST_SUSPENSION_SECONDS) is None


def test_crashes_that_are_far_apart_do_not_suspend():
    offenses = Offenses()
    assert not any(offenses.add(each * SPAN_SECONDS) for each in range(20))


def test_suspensions_double_up_to_the_longest_and_are_forgotten():
    offenses, now, lengths = Offenses(), 0.0, []
    for _ in range(10):
        for _ in range(MAX_CRASHES):
            offenses.add(now)
        lengths.append(offenses.until - now)
        now = offenses.until
    assert lengths[:3] == [FIRST_SUSPENSION_SECONDS * factor for factor in (1, 2, 4)]
    assert max(lengths) == lengths[-1] == LONGEST_SUSPENSION_SECONDS
    now += FORGET_SECONDS + 1
    assert [offenses.add(now) for _ in range(MAX_CRASHES)][-1]
    assert offenses.until - now == FIRST_SUSPENSION_SECONDS


def test_a_tenant_whose_functions_have_all_run_before_pays_nothing_for_a_neighbors_new_function():
    offenses = TenantOffenses()
    running = [Running(BEN, True), Running(ANA, False), Running(BEN, True)]
    suspended = [offenses.crashed(float(each), running, is_sure=True) for each in range(MAX_CRASHES)]
    assert suspended[-1] == [ANA]


def test_tenants_that_may_equally_have_caused_a_crash_count_a_part_each():
    running = [Running(ANA, True), Running(BEN, True)]
    assert blame(running) == [ANA, BEN]
    offenses = TenantOffenses()
    for each in range(2 * MAX_CRASHES - 1):
        assert offenses.crashed(float(each), running, is_sure=True) == []
    assert offenses.crashed(9.0, running, is_sure=True) == [ANA, BEN]


@pytest.mark.parametrize(("crashes", "delay"), [(0, 0.0), (1, 1.0), (2, 2.0)])
def test_the_next_compilation_waits_longer_after_each_crash(crashes: int, delay: float):
    offenses = TenantOffenses()
    for _ in range(crashes):
        assert not offenses.compiler_crashed(ANA, 1.0)
    assert offenses.compile_delay(ANA, 1.0) == delay
    assert offenses.compile_delay(ANA, 1.0 + delay) == 0.0
    assert offenses.compile_delay(BEN, 1.0) == 0.0


def test_a_tenant_whose_compiler_processes_crash_may_still_launch():
    offenses = TenantOffenses()
    assert [offenses.compiler_crashed(ANA, 1.0) for _ in range(MAX_CRASHES)][-1]
    problem = offenses.compile_problem(ANA, 1.0)
    assert problem is not None
    assert "cannot compile functions for another 30 s" in problem.message
    assert offenses.launch_problem(ANA, 1.0) is None
    assert offenses.suspended_seconds("ana", 1.0) == FIRST_SUSPENSION_SECONDS
