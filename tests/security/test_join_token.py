"""Tests of join tokens: read from text or a file, written with access for the user only, and displayed
without secrets.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import AccessError
from atoll.security.join_token import JoinToken, join_of_environment, read_join
from atoll.security.start_security import advertised
from atoll.wire.address import Address

PRINT = "0123456789abcdef" * 4
JOIN = JoinToken(Address(host="10.0.0.1", port=7000, tls=True), PRINT, "a token/with %, # and ö")


@given(st.text(min_size=1), st.sampled_from(["10.0.0.1", "::1", "head.example"]), st.integers(1, 65535))
def test_any_token_and_address_are_read_as_they_were_written(token: str, host: str, port: int) -> None:
    if any(0xD800 <= ord(each) < 0xE000 for each in token):
        return
    join = JoinToken(Address(host=host, port=port, tls=True), PRINT, token)
    assert read_join(f" {join}\n") == join
    assert str(join).isascii()
    assert len(str(join).split()) == 1


def test_it_is_written_to_a_file_for_its_user_alone_and_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "join"
    file.write_text("of a cluster that is gone")
    file.chmod(0o644)
    JOIN.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_join(str(file)) == JOIN
    assert [path.name for path in tmp_path.iterdir()] == ["join"]
    monkeypatch.setenv("ATOLL_JOIN", str(file))
    assert join_of_environment() == JOIN
    monkeypatch.setenv("ATOLL_JOIN", str(JOIN))
    assert join_of_environment() == JOIN
    monkeypatch.delenv("ATOLL_JOIN")
    assert join_of_environment() is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/nowhere/join", "neither a join token .* nor a file with one: No such file"),
        ("join", "No such file or directory in the working directory; give an absolute path"),
        ("10.0.0.1:7000", "neither a join token"),
        (f"atoll://10.0.0.1/{PRINT}/sesame", "begins with atoll://HOST:PORT/"),
        ("atoll://10.0.0.1:7000", "was cut"),
        (f"atoll://10.0.0.1:7000/{PRINT}", "was cut"),
        (f"atoll://10.0.0.1:7000/{PRINT[:-1]}/sesame", "was cut"),
        (f"atoll://10.0.0.1:7000/{PRINT.upper()}/sesame", "was cut"),
    ],
)
def test_what_is_none_is_refused_with_the_reason_and_without_the_token(text: str, words: str) -> None:
    with pytest.raises(AccessError, match=words) as caught:
        read_join(text)
    assert "sesame" not in str(caught.value)


def test_a_file_with_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "join"
    for content in (b"a password, sesame", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(AccessError) as caught:
            read_join(str(file))
        assert str(file) in str(caught.value)
        assert "sesame" not in str(caught.value)


def test_a_token_is_not_printed() -> None:
    assert "token" not in repr(JOIN)


def test_a_join_string_may_have_several_addresses() -> None:
    listen = Address(host="0.0.0.0", port=7000, tls=True)
    known = advertised(listen, "10.0.0.1, head:7001,[fd00::1]")
    join = JoinToken(known, "a" * 64, "token")
    assert str(join) == f"atoll://10.0.0.1:7000,head:7001,[fd00::1]:7000/{'a' * 64}/token"
    assert read_join(str(join)) == join
