"""Tests of the user's key: created once, private, and with a different derived key for each purpose."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from atoll.errors import AccessError
from atoll.security.user_key import user_key


def test_the_key_is_created_once_for_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state" / "key"
    monkeypatch.setenv("ATOLL_KEY_FILE", str(file))
    key = user_key("journal")
    assert len(key) == 32
    assert user_key("journal") == key
    assert user_key("programs") != key
    assert key not in file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_a_key_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    monkeypatch.setenv("ATOLL_KEY_FILE", str(file))
    user_key("journal")
    file.chmod(0o644)
    with pytest.raises(AccessError, match="chmod 600"):
        user_key("journal")
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(AccessError, match="5 bytes"):
        user_key("journal")
    monkeypatch.setenv("ATOLL_KEY_FILE", str(file / "no directory"))
    with pytest.raises(AccessError, match="ATOLL_KEY_FILE"):
        user_key("journal")
