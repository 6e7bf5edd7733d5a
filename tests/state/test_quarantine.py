"""Which functions are refused, and which are suspects, after a worker has crashed."""

from __future__ import annotations

import signal

import pytest

from atoll.cluster.processes.leases import FAILED_STATUS
from atoll.state.quarantine import Quarantine

ABORTED = -signal.SIGABRT


def test_what_ran_alone_on_an_island_of_one_host_is_refused():
    quarantine = Quarantine()
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set())
    assert "SIGABRT" in quarantine.refused["f"].message


def test_where_xla_may_have_ended_the_worker_for_another_host_it_is_suspected_first():
    quarantine = Quarantine()
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set(), has_others=True)
    assert (quarantine.refused, quarantine.suspects) == ({}, {"f"})
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set(), has_others=True)
    assert set(quarantine.refused) == {"f"}, "alone, and again"


def test_a_suspect_that_ends_well_is_cleared():
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.crashed(ABORTED, "killed by SIGABRT", {"f"}, set(), has_others=True)
        quarantine.ended_well("f")
    assert quarantine.refused == {}


def test_a_compilation_is_refused_where_two_crashes_had_it():
    quarantine = Quarantine()
    quarantine.crashed(ABORTED, "killed by SIGABRT", set(), {"f"}, has_others=True)
    assert quarantine.refused == {}
    quarantine.crashed(ABORTED, "killed by SIGABRT", {"g"}, {"f", "h"}, has_others=True)
    assert (set(quarantine.refused), quarantine.suspects) == ({"f"}, {"g"})


@pytest.mark.parametrize("status", [-signal.SIGSEGV, 1])
def test_what_xla_does_to_no_other_host_is_sure(status: int):
    quarantine = Quarantine()
    quarantine.crashed(status, "it crashed", {"f"}, set(), has_others=True)
    assert set(quarantine.refused) == {"f"}


def test_after_a_bug_in_the_worker_a_function_is_suspected_first():
    quarantine = Quarantine()
    quarantine.crashed(FAILED_STATUS, "a bug has ended it", {"f"}, set())
    assert (quarantine.refused, quarantine.suspects) == ({}, {"f"})
    quarantine.ended_well("f")
    quarantine.crashed(FAILED_STATUS, "a bug has ended it", {"f"}, set())
    assert quarantine.refused == {}
    quarantine.crashed(FAILED_STATUS, "a bug has ended it", {"f"}, set())
    assert set(quarantine.refused) == {"f"}
