"""The tokens that a cluster requires: per tenant from its clients, and from its own processes. Pure.

The controller compares and stores digests. A token becomes its digest when it enters the controller's process, so no
event, journal, snapshot or log contains a token. Anyone who reads a digest cannot use it, because the controller hashes
it again on its way in.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable

import msgspec

from atoll.cluster.tenant_settings import DEFAULT_NAME, TenantSettings, token_hash, whose
from atoll.security.roles import is_of_the_cluster
from atoll.wire.pending_connections import address_key


def digest(token: str) -> str:
    """Return the digest of a token, which the controller compares and stores; "" for no token."""
    return token_hash(token) if token else ""


class Tokens(msgspec.Struct, frozen=True):
    """The digests of the cluster's tokens; "" means that no token is required.

    Without a token of their own, hosts and the engine use that of clients. `tenants()` returns the current tenants.
    """

    client: str = ""
    host: str = ""
    tenants: Callable[[], Iterable[TenantSettings]] = tuple

    def are_right(self, role: str, token_digest: str) -> bool:
        """Return whether `token_digest` is the digest of the token for that role."""
        if not is_of_the_cluster(role):
            return self.tenant_of(token_digest) is not None
        expected = self.host or self.client
        return not expected or hmac.compare_digest(token_digest.encode(), expected.encode())

    def tenant_of(self, token_digest: str) -> str | None:
        """Return the name of the tenant whose token has the digest `token_digest`; None if no tenant has it.

        The cluster's own token is that of `default`, even if an operator has given it to another tenant as well.
        Otherwise `default` would lose its role until the cluster ends.
        """
        if self.client and hmac.compare_digest(token_digest.encode(), self.client.encode()):
            return DEFAULT_NAME
        tenants = tuple(self.tenants())
        found = whose(tenants, token_digest)
        if found is not None or self.client:
            return found
        has_others = any(tenant.name != DEFAULT_NAME for tenant in tenants)
        return None if has_others else DEFAULT_NAME


BURST = 20
PER_SECOND = 1.0
TOO_MANY = "too many wrong tokens came from this address: try again in a minute, with the right one"
MAX_ADDRESSES = 4096


class Guesses:
    """Limits the wrong tokens per address. Addresses that are unknown, and unix sockets, are not limited.

    After `BURST` wrong tokens the address may try `PER_SECOND`. Until then the controller does not look at its tokens,
    right or wrong, so that a guess reveals nothing. A unix socket is open to one user, who can read the tokens.
    """

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}  # per address: the count and its time

    def may_try(self, address: str, now: float) -> bool:
        """Return whether a token from this address is checked now."""
        return self._count(address, now) < BURST

    def wrong(self, address: str, now: float) -> None:
        """Count a wrong token."""
        if not _is_limited(address):
            return
        key = address_key(address)
        count = self._count(address, now)
        self._spent.pop(key, None)
        while len(self._spent) >= MAX_ADDRESSES:
            del self._spent[next(iter(self._spent))]
        self._spent[key] = count + 1, now

    def _count(self, address: str, now: float) -> float:
        count, since = self._spent.get(address_key(address), (0.0, now))
        return max(0.0, count - (now - since) * PER_SECOND)


def _is_limited(address: str) -> bool:
    return bool(address) and not address.startswith("user ")
