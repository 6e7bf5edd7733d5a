"""The tokens that a cluster asks for: of its clients, who are one tenant or several, and of its own processes.

The controller compares and keeps digests. A token becomes its digest where it enters the controller's process, so no
event, journal, snapshot or log has a token. Anyone who reads a digest cannot use it: it is hashed again on its way in.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.cluster.tenant_settings import DEFAULT_NAME, TenantSettings, token_hash, whose
from atoll.security.roles import is_of_the_cluster


def digest(token: str) -> str:
    """Return what the controller compares and keeps of a token; "" for none."""
    return token_hash(token) if token else ""


@dataclass(frozen=True)
class Tokens:
    """Digests; "" asks for none. Without one of their own, hosts and the engine have that of clients.

    `tenants()` are those of the moment.
    """

    client: str = ""
    host: str = ""
    tenants: Callable[[], Iterable[TenantSettings]] = tuple

    def are_right(self, role: str, said: str) -> bool:
        """Return whether `said` is the digest of the token for that role."""
        if not is_of_the_cluster(role):
            return self.tenant_of(said) is not None
        expected = self.host or self.client
        return not expected or hmac.compare_digest(said.encode(), expected.encode())

    def tenant_of(self, said: str) -> str | None:
        """Return the name of the tenant whose token has the digest `said`; None if no tenant has it."""
        tenants = tuple(self.tenants())
        found = whose(tenants, said)
        if found is not None:
            return found
        if self.client:
            return DEFAULT_NAME if hmac.compare_digest(said.encode(), self.client.encode()) else None
        has_others = any(tenant.name != DEFAULT_NAME for tenant in tenants)
        return None if has_others else DEFAULT_NAME
