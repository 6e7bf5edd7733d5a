"""The values of a tenant that an operator changes on the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.protocol.messages import SetTenant
from atoll.quantities import parse_bytes


@dataclass(frozen=True)
class TenantValues:
    """A tenant's share, its priority, and its memory limit in bytes on each device (0 for no limit)."""

    share: float
    priority: int
    memory: int

    @classmethod
    def parse(cls, share: float | None, priority: float | None, memory: str | None) -> TenantValues:
        """Return the values of a form, whose empty fields are None. Raises ValueError if one is missing or invalid."""
        if share is None or priority is None:
            raise ValueError("the share and the priority need a number")
        return cls(float(share), int(priority), parse_bytes(memory or ""))

    def change(self, tenant: str, to: TenantValues) -> SetTenant:
        """Return the message that changes those values of `tenant` that differ, so that it resets no other change."""
        changed: dict[str, Any] = {
            name: getattr(to, name) for name in ("share", "priority") if getattr(to, name) != getattr(self, name)
        }
        if to.memory != self.memory:
            changed["limits"] = {"memory": to.memory}
        return SetTenant(tenant, **changed)
