"""Tests of telling files that do not exist from those that cannot be examined."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.missing import exists, read_if_exists
from tests.file_limits import no_more_files


def test_a_file_that_does_not_exist_has_no_content(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert exists(file)
    assert read_if_exists(file) == b"content"
    for missing in (tmp_path / "other", file / "below"):
        assert not exists(missing)
        assert read_if_exists(missing) is None


def test_a_file_that_cannot_be_opened_is_not_reported_as_missing(tmp_path: Path) -> None:
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        read_if_exists(tmp_path)


def test_a_file_that_cannot_be_examined_is_not_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        exists(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links"):
        read_if_exists(tmp_path / "loop")
