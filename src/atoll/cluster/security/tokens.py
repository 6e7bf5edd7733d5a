"""The tokens that a cluster asks for: one of its clients, and one of its own processes."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from atoll.cluster.security.roles import is_of_the_cluster


@dataclass(frozen=True)
class Tokens:
    """ "" asks for none; without one of their own, hosts and the engine have that of clients."""

    client: str = ""
    host: str = ""

    def are_right(self, role: str, token: str) -> bool:
        """Whether who introduces itself in that role has the token for it."""
        expected = self.host or self.client if is_of_the_cluster(role) else self.client
        return not expected or hmac.compare_digest(token.encode(), expected.encode())
