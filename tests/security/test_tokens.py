"""Tests of finding a token's tenant, and of limiting how often an address may try tokens."""

from __future__ import annotations

from atoll.cluster.tenant_settings import DEFAULT_NAME, TenantSettings
from atoll.security.tokens import BURST, MAX_ADDRESSES, Guesses, Tokens, digest


def test_the_clusters_token_is_that_of_default_even_if_another_tenant_has_it() -> None:
    tokens = Tokens(digest("cluster"), "", lambda: [TenantSettings("ben", digest("cluster"))])
    assert tokens.tenant_of(digest("cluster")) == DEFAULT_NAME
    assert tokens.tenant_of(digest("another")) is None


def tries(guesses: Guesses, address: str, seconds: int, per_second: int) -> int:
    """Return how many wrong tokens are checked in this time."""
    looked_at = 0
    for count in range(seconds * per_second):
        now = count / per_second
        if guesses.may_try(address, now):
            guesses.wrong(address, now)
            looked_at += 1
    return looked_at


def test_an_address_may_guess_a_burst_and_then_once_per_second() -> None:
    assert tries(Guesses(), "10.0.0.2", 60, 100) <= BURST + 61


def test_other_addresses_and_right_tokens_do_not_count() -> None:
    guesses = Guesses()
    tries(guesses, "10.0.0.2", 1, 100)
    assert not guesses.may_try("10.0.0.2", 0.99)
    assert guesses.may_try("10.0.0.3", 0.99)
    assert guesses.may_try("10.0.0.2", 1.0 + BURST), "it recovers"


def test_unix_sockets_are_not_limited() -> None:
    assert tries(Guesses(), "user 1000", 1, 1000) == 1000


def test_addresses_are_remembered_up_to_a_bound() -> None:
    guesses = Guesses()
    for count in range(2 * MAX_ADDRESSES):
        guesses.wrong(f"10.{count >> 16}.{count >> 8 & 255}.{count & 255}", 0.0)
    assert len(guesses._spent) == MAX_ADDRESSES
