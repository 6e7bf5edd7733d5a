"""Tests of the file with a standby's state, which commands read."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cluster.state_machine import IllegalTransition
from atoll.controller_process.standby_status import StandbyProgress, StandbyState, StandbyStatus, standby_status
from atoll.errors import ClusterError

ONE = "tls://one:7000"


def test_each_state_is_written_with_its_time(tmp_path: Path) -> None:
    times = iter([1.0, 2.0, 3.0, 4.0])
    progress = StandbyProgress(str(tmp_path), ONE, lambda: next(times))
    assert standby_status(str(tmp_path)) == StandbyStatus(ONE, StandbyState.COPYING, 1.0)
    progress.follows()
    assert standby_status(str(tmp_path)) == StandbyStatus(ONE, StandbyState.FOLLOWING, 2.0, has_copy=True)
    progress.lost("it ended")
    progress.lost("it cannot be reached")  # attempts to reconnect fail
    assert standby_status(str(tmp_path)) == StandbyStatus(ONE, StandbyState.LOST, 3.0, "it ended", has_copy=True)
    progress.copies()
    assert standby_status(str(tmp_path)) == StandbyStatus(ONE, StandbyState.COPYING, 4.0)


def test_a_standby_that_takes_over_is_one_no_more(tmp_path: Path) -> None:
    progress = StandbyProgress(str(tmp_path), ONE)
    progress.follows()
    progress.takes_over()
    assert standby_status(str(tmp_path)) is None
    with pytest.raises(IllegalTransition):
        progress.lost("it ended")


def test_a_state_that_cannot_be_read_says_nothing_about_a_standby(tmp_path: Path) -> None:
    file = tmp_path / "standby.json"
    file.symlink_to(file)
    with pytest.raises(ClusterError, match=r"cannot find out whether .* is that of a standby: .*symbolic links"):
        standby_status(str(tmp_path))
    file.unlink()
    file.write_text("{}")
    with pytest.raises(ClusterError, match=r"is that of a standby: .*controller"):
        standby_status(str(tmp_path))


def test_a_copy_that_was_not_complete_is_recorded_at_the_loss(tmp_path: Path) -> None:
    progress = StandbyProgress(str(tmp_path), ONE)
    progress.lost("it ended")
    status = standby_status(str(tmp_path))
    assert status is not None
    assert not status.has_copy
