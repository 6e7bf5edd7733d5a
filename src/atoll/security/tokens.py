"""The tokens that a cluster asks for: of its clients, who are one tenant or several, and of its own processes."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.cluster.tenants import DEFAULT_NAME, TenantSettings, whose
from atoll.security.roles import is_of_the_cluster


@dataclass(frozen=True)
class Tokens:
    """ "" asks for none; without one of their own, hosts and the engine have that of clients.

    `tenants()` are those of the moment.
    """

    client: str = ""
    host: str = ""
    tenants: Callable[[], Iterable[TenantSettings]] = tuple

    def are_right(self, role: str, token: str) -> bool:
        """Whether who introduces itself in that role has the token for it."""
        if not is_of_the_cluster(role):
            return self.tenant_of(token) is not None
        expected = self.host or self.client
        return not expected or hmac.compare_digest(token.encode(), expected.encode())

    def tenant_of(self, token: str) -> str | None:
        """The name of the tenant that a client with this token is; None where it is nobody's."""
        tenants = tuple(self.tenants())
        found = whose(tenants, token)
        if found is not None:
            return found
        if self.client:
            return DEFAULT_NAME if hmac.compare_digest(token.encode(), self.client.encode()) else None
        has_others = any(tenant.name != DEFAULT_NAME for tenant in tenants)
        return None if has_others else DEFAULT_NAME
