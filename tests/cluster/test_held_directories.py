"""Tests of the lock and the record in the directory of a running cluster."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cluster.held_directories import RECORD_FILE, HeldDirectory, is_held

HOLDS = """
import pathlib, sys, time
from atoll.cluster.held_directories import HeldDirectory
HeldDirectory(pathlib.Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldDirectory]:
    held = HeldDirectory(tmp_path)
    yield held
    held.release()


def test_a_directory_is_held_until_its_process_ends(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_held(tmp_path)
        process.kill()
        process.wait()
    assert not is_held(tmp_path)


def test_a_cleaner_cannot_lock_a_held_directory(tmp_path: Path, held: HeldDirectory) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # as `systemd-tmpfiles` tries, which then skips it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_record_that_was_removed_is_written_again(tmp_path: Path, held: HeldDirectory) -> None:
    record = tmp_path / RECORD_FILE
    assert not held.keep_record(), "it is not written yet"
    record.write_bytes(b"the record")
    assert not held.keep_record()
    record.unlink()
    assert held.keep_record()
    assert record.read_bytes() == b"the record"


def test_a_record_stays_young(tmp_path: Path, held: HeldDirectory) -> None:
    record = tmp_path / RECORD_FILE
    record.write_bytes(b"the record")
    os.utime(record, (1.0, 1.0))
    held.keep_record()
    assert time.time() - record.stat().st_mtime < 3600.0
