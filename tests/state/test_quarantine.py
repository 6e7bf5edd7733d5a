"""Suspected and refused functions after crashes of workers."""

from __future__ import annotations

import signal

import pytest

from atoll.cluster.processes.leases import FAILED_STATUS
from atoll.state.quarantine import Quarantine

ABORTED = -signal.SIGABRT


def test_a_function_that_ran_alone_on_an_island_of_one_host_is_refused():
    quarantine = Quarantine()
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set())
    assert "SIGABRT" in quarantine.refused["f"].message


def test_a_function_is_suspected_first_if_xla_may_have_ended_the_worker_for_another_host():
    quarantine = Quarantine()
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set(), has_others=True)
    assert (quarantine.refused, quarantine.suspects) == ({}, {"f"})
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set(), has_others=True)
    assert set(quarantine.refused) == {"f"}, "it was the only function at both crashes"


def test_a_suspect_that_ends_well_is_cleared():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set(), has_others=True)
        quarantine.ended_well("f")
    assert quarantine.refused == {}


def test_a_function_that_was_being_compiled_at_two_crashes_is_refused():
    quarantine = Quarantine()
    quarantine.crashed(ABORTED, "killed by SIGABRT", set(), {"f"}, has_others=True)
    assert quarantine.refused == {}
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"g"}, {"f", "h"}, has_others=True)
    assert (set(quarantine.refused), quarantine.suspects) == ({"f"}, {"g"})


@pytest.mark.parametrize("status", [-signal.SIGSEGV, 1])
def test_a_crash_that_xla_does_not_spread_has_a_certain_cause(status: int):
    quarantine = Quarantine()
    quarantine.crashed(status, "the worker crashed", {"f"}, set(), has_others=True)
    assert set(quarantine.refused) == {"f"}


def test_a_function_is_suspected_first_after_a_bug_in_the_worker():
    quarantine = Quarantine()
    quarantine.crashed(FAILED_STATUS, "a bug ended the worker", {"f"}, set())
    assert (quarantine.refused, quarantine.suspects) == ({}, {"f"})
    quarantine.ended_well("f")
    quarantine.crashed(FAILED_STATUS, "a bug ended the worker", {"f"}, set())
    assert quarantine.refused == {}
    quarantine.crashed(FAILED_STATUS, "a bug ended the worker", {"f"}, set())
    assert set(quarantine.refused) == {"f"}
