"""Tests of a killed controller, whose successor continues where it was: clients get the results of an undisturbed run.

The suite has one restart, and a takeover by a standby. `make restarts` has a hundred restarts (ATOLL_TEST_RESTARTS)
at random moments. The replay of the journal must produce the state of each live controller.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from atoll.errors import ConnectError, StatusError
from atoll.operate.operator_requests import request_operation
from atoll.protocol.messages import RemapRequest
from atoll.wire.address import parse_address
from tests.end_to_end.journal_archive import JournalArchive
from tests.end_to_end.lost_controller import Clients, answers, check, controller, taken_over
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster

RESTARTS = int(os.environ.get("ATOLL_TEST_RESTARTS", "1"))


def remap(cluster: StandingCluster, island: int) -> None:
    """Move the sessions that have a slice. If the controller ends during the move, it may or may not have happened."""
    for session in cluster.report()["sessions"]:
        for each in session["slices"]:
            with contextlib.suppress(ConnectError, StatusError):
                request_operation(
                    parse_address(cluster.address),
                    cluster.token,
                    RemapRequest(session["id"], each["id"], island),
                    None,
                    5,
                )


@pytest.mark.slow
def test_clients_of_a_controller_that_is_killed_again_and_again_lose_nothing(
    journaled_cluster: StandingCluster, start_python: StartPython, tmp_path: Path, module_directory: Path
) -> None:
    rng = random.Random(os.environ.get("ATOLL_TEST_SEED", "1"))
    cluster = journaled_cluster
    archive = JournalArchive(module_directory / "journal", module_directory / "archive")
    clients = Clients(cluster, start_python, tmp_path)
    seconds, compared = [], 0
    for count in range(RESTARTS):
        time.sleep(rng.uniform(0.1, 2.0))
        if rng.random() < 0.5:
            remap(cluster, count % 2)
        controller(cluster).kill()
        seconds.append(answers(cluster))
        check(cluster)
        if count % 10 == 9:
            compared += archive.check_snapshots()
            print(
                f"{count + 1} restarts; median {sorted(seconds)[len(seconds) // 2]:.2f} s, most {max(seconds):.2f} s",
                flush=True,
            )
    of_standby = JournalArchive(module_directory / "standby" / "journal", module_directory / "archive-of-standby")
    cluster.start_standby(module_directory / "standby")
    controller(cluster).kill()
    until_taken_over = taken_over(cluster)
    check(cluster)
    trainings = clients.finish()
    archive.close()
    of_standby.close()
    compared += archive.check_snapshots()
    assert compared, "a standby begins with a snapshot of the live controller"
    lost = archive.check_continued(of_standby)
    compared += of_standby.check_snapshots()
    print(
        f"{RESTARTS} restarts, {trainings} trainings; another controller answers within {max(seconds):.2f} s at "
        f"most, and a standby after {until_taken_over:.2f} s; {compared} snapshots are as replayed, and {lost} events "
        "had not reached the standby"
    )
