from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import AddressError
from atoll.wire.address import Address, check_may_listen, parse_address


@pytest.mark.parametrize(
    ("text", "address", "printed"),
    [
        ("unix:/run/atoll.sock", Address(path="/run/atoll.sock"), "unix:/run/atoll.sock"),
        ("unix:///run/atoll.sock", Address(path="/run/atoll.sock"), "unix:/run/atoll.sock"),
        ("grpc://unix:/run/a", Address(path="/run/a"), "unix:/run/a"),
        ("localhost:80", Address(host="localhost", port=80), "localhost:80"),
        ("tls://10.0.0.1:8080", Address(host="10.0.0.1", port=8080, tls=True), "tls://10.0.0.1:8080"),
        ("tcp://10.0.0.1:8080", Address(host="10.0.0.1", port=8080), "10.0.0.1:8080"),
        ("grpc://host.example:1", Address(host="host.example", port=1), "host.example:1"),
        ("[::1]:80", Address(host="::1", port=80), "[::1]:80"),
        (" 127.0.0.1:0 ", Address(host="127.0.0.1", port=0), "127.0.0.1:0"),
    ],
)
def test_addresses_are_read_and_printed(text, address, printed):
    assert parse_address(text) == address
    assert str(address) == printed
    assert parse_address(printed) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "invalid address"),
        ("localhost", "invalid address"),
        (":80", "invalid address"),
        ("http://localhost:80", "invalid address"),
        ("localhost:", "invalid address"),
        ("localhost:eighty", "invalid address"),
        ("localhost:65536", "invalid address"),
        ("localhost:-1", "invalid address"),
        ("localhost:٣", "invalid address"),
        ("unix:atoll.sock", "absolute path"),
        ("unix:", "absolute path"),
        ("unix:/" + 107 * "x", "107 bytes"),
        ("unix:/" + 54 * "é", "107 bytes"),
    ],
)
def test_what_is_no_address_is_refused_with_the_reason(text, reason):
    with pytest.raises(AddressError, match=reason):
        parse_address(text)


def test_the_error_of_a_join_token_says_where_to_put_it_and_does_not_show_it() -> None:
    with pytest.raises(AddressError, match="set ATOLL_JOIN") as error:
        parse_address("atoll://10.0.0.1:7000/0123456789abcdef/secret-token")
    assert "secret-token" not in str(error.value)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_an_address_error(text):
    try:
        address = parse_address(text)
    except AddressError:
        return
    assert address.is_unix or 0 <= address.port <= 65535


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("unix:/a", "unix:/a"),
        ("10.0.0.1:5", "tls://10.0.0.1:5"),
        ("[::1]:5", "tls://[::1]:5"),
        ("a.b:5", "tls://a.b:5"),
    ],
)
def test_an_address_on_the_network_can_be_secured(text, written):
    secured = parse_address(text).secured()
    assert str(secured) == written
    assert parse_address(written) == secured
    assert parse_address(written).is_local == parse_address(text).is_local


@pytest.mark.parametrize(("text", "everywhere"), [("0.0.0.0:1", True), ("[::]:1", True), ("10.0.0.1:1", False)])
def test_an_address_that_stands_for_all_of_a_machines_is_known(text, everywhere):
    assert parse_address(text).is_everywhere is everywhere


def test_what_is_reached_on_several_networks_has_several_addresses():
    address = parse_address("tls://10.0.0.1:7000, [fd00::1]:7001,head:7000")
    assert str(address) == "tls://10.0.0.1:7000,[fd00::1]:7001,head:7000"
    assert [str(each) for each in address.each] == ["tls://10.0.0.1:7000", "tls://[fd00::1]:7001", "tls://head:7000"]
    assert parse_address("a:1,b:2").secured() == parse_address("tls://a:1,b:2")
    assert not parse_address("127.0.0.1:1,10.0.0.1:1").is_local
    with pytest.raises(AddressError, match="listens at one address"):
        check_may_listen(parse_address("127.0.0.1:1,127.0.0.2:1"), "")


@pytest.mark.parametrize("text", ["10.0.0.1:1,", "10.0.0.1:1,10.0.0.2", ",10.0.0.1:1", "unix:/a,b:x,"])
def test_each_of_several_addresses_is_one(text):
    if text.startswith("unix:"):  # whose path may have commas
        assert parse_address(text).path == "/a,b:x,"
        return
    with pytest.raises(AddressError, match="invalid address"):
        parse_address(text)


@pytest.mark.parametrize("text", ["unix:/a", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_this_machines_own_addresses_need_no_token(text):
    check_may_listen(parse_address(text), "")


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "host.example:1", "127.0.0.1.evil:1"])
def test_an_address_that_strangers_reach_needs_a_token(text):
    with pytest.raises(AddressError, match="ATOLL_TOKEN"):
        check_may_listen(parse_address(text), "")
    check_may_listen(parse_address(text), "secret")
    check_may_listen(parse_address(text).secured(), "")
