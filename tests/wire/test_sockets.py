"""Blocking sockets: bound for one user, and dialed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.errors import AccessError, ConnectError, HandshakeCutError, UnreachableError
from atoll.wire.address import Address, parse_address
from atoll.wire.sockets import bind, bind_unix, check_is_free, dial, lacks_trust, none_answered
from tests.file_limits import no_more_files


def test_a_unix_socket_is_its_users_alone_and_replaces_a_stale_one(short_directory: Path):
    path = str(short_directory / "s")
    for _ in range(2):
        with bind_unix(path) as sock:
            mode = stat.S_IMODE(os.stat(path).st_mode)
            assert mode == 0o600
            assert sock.getsockname() == path


def test_files_of_other_threads_keep_their_modes_while_a_socket_is_bound(short_directory: Path, monkeypatch):
    made = short_directory / "made"
    (short_directory / "s").touch()
    unlink = os.unlink

    def make_and_unlink(path: str) -> None:
        made.mkdir(mode=0o700)
        unlink(path)

    monkeypatch.setattr(os, "unlink", make_and_unlink)
    bind_unix(str(short_directory / "s")).close()
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_socket_that_cannot_be_bound_leaves_no_descriptor(short_directory: Path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No such file"):
        bind_unix(str(short_directory / "none" / "s"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_address_is_free_unless_a_process_listens_there(short_directory: Path) -> None:
    unix = Address(path=str(short_directory / "socket"))
    for _ in range(2):
        check_is_free(unix)
    assert not os.path.exists(unix.path)
    with bind(Address(host="127.0.0.1")) as listening:
        taken = Address(host="127.0.0.1", port=listening.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            check_is_free(taken)
    check_is_free(taken)
    for bad in (Address(path="/nowhere/socket"), Address(host="192.0.2.1", port=1024)):
        with pytest.raises(OSError, match=r"No such file|Cannot assign"):
            check_is_free(bad)


def test_dialing_where_no_process_listens_names_the_address(short_directory: Path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectError, match=f"cannot reach the controller at unix:{short_directory}/none"):
        dial(Address(path=f"{short_directory}/none"), what="the controller")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_cannot_open_a_socket_says_nothing_about_its_peer(short_directory: Path):
    address = Address(path=f"{short_directory}/none")
    with (
        no_more_files(),
        pytest.raises(ConnectError, match=r"cannot open a connection .*Too many open files") as dialed,
    ):
        dial(address, what="the controller")
    assert not isinstance(dialed.value, UnreachableError)
    with pytest.raises(UnreachableError):
        dial(address, what="the controller")


def test_of_several_addresses_the_first_that_answers_is_dialed() -> None:
    with bind(Address(host="127.0.0.1")) as listener:
        port = listener.getsockname()[1]
        dead = Address(host="127.0.0.2", port=port)
        with dial(replace(dead, others=(Address(host="127.0.0.1", port=port),))) as connected:
            assert connected.getpeername() == ("127.0.0.1", port)


def test_where_none_of_several_addresses_answers_all_are_named() -> None:
    with bind(Address(host="127.0.0.1")) as listener:
        port = listener.getsockname()[1]
    dead = parse_address(f"127.0.0.1:{port},127.0.0.2:{port}")
    with pytest.raises(ConnectError, match=rf"at 127.0.0.2:{port}: Connection refused, nor at 127.0.0.1:{port}"):
        dial(dead)


def test_an_attempt_is_in_vain_if_no_address_leads_to_a_trusted_peer_and_may_succeed_later_otherwise() -> None:
    address = parse_address("a:1,b:1")
    wrong, dead, cut = AccessError("wrong"), ConnectError("dead"), HandshakeCutError("cut")
    for errors, in_vain in (
        ((wrong, wrong), True),
        ((wrong, dead), False),
        ((dead, wrong), False),
        ((wrong, cut), False),
        ((dead, dead), False),
        ((cut, dead), False),
    ):
        error = none_answered(address, errors)
        assert lacks_trust(error) is in_vain, errors
        assert isinstance(error, AccessError) is (wrong in errors), errors
