"""Tests of the child that writes a snapshot, and of what it reports."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.journal.snapshots import start_snapshot, wait_for_snapshot


def raising(error: Exception) -> Callable[[bytes], None]:
    def write(content: bytes) -> None:
        raise error

    return write


def test_a_snapshot_is_written_with_the_present_state(tmp_path: Path) -> None:
    wait_for_snapshot(start_snapshot(lambda: b"state", (tmp_path / "snapshot").write_bytes))
    assert (tmp_path / "snapshot").read_bytes() == b"state"


def test_a_full_disk_is_reported_in_one_line_and_a_bug_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left") as raised:
        wait_for_snapshot(start_snapshot(lambda: b"", raising(OSError(errno.ENOSPC, "No space left", "/j"))))
    assert raised.value.errno == errno.ENOSPC
    assert capfd.readouterr().err == "atoll: a snapshot failed: [Errno 28] No space left: '/j'\n"
    with pytest.raises(OSError, match="a snapshot of the controller failed"):
        wait_for_snapshot(start_snapshot(lambda: b"", raising(KeyError("x"))))
    assert "Traceback (most recent call last)" in capfd.readouterr().err
