"""In which order the addresses of a peer are dialed."""

from __future__ import annotations

import pytest

from atoll.errors import FrameError
from atoll.wire.address import parse_address
from atoll.wire.resumption.link_messages import AlternateAddresses
from atoll.wire.resumption.peer_addresses import PeerAddresses

ONE, OTHER, STANDBY = (parse_address(f"10.0.0.{number}:7000") for number in (1, 2, 3))
SEVERAL = parse_address("10.0.0.1:7000,10.0.0.2:7000")


def test_all_addresses_of_a_process_come_before_those_of_which_it_told() -> None:
    addresses = PeerAddresses(SEVERAL)
    assert addresses.in_turn == (ONE, OTHER)
    addresses.replace_alternates(AlternateAddresses((str(STANDBY), str(ONE))), None)
    assert addresses.in_turn == (ONE, OTHER, STANDBY)


def test_where_somebody_has_answered_last_is_dialed_first() -> None:
    addresses = PeerAddresses(ONE)
    addresses.replace_alternates(AlternateAddresses((str(STANDBY),)), None)
    addresses.answered(STANDBY)
    assert addresses.in_turn == (STANDBY, ONE)
    addresses.answered(ONE)
    assert addresses.in_turn == (ONE, STANDBY)


def test_a_process_on_several_networks_is_one() -> None:
    addresses = PeerAddresses(SEVERAL)
    assert addresses.of_one(OTHER) == SEVERAL
    assert addresses.of_one(STANDBY) == STANDBY


def test_an_address_that_is_none_is_an_error_of_the_peer_and_changes_nothing() -> None:
    addresses = PeerAddresses(ONE)
    with pytest.raises(FrameError, match="invalid alternate address"):
        addresses.replace_alternates(AlternateAddresses((str(STANDBY), "nowhere")), None)
    assert addresses.in_turn == (ONE,)
