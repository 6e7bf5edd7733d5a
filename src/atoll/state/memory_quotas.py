"""The quotas of device memory that a tenant may have."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from atoll.cluster.locations import HostDevice, MemoryRequirement, total
from atoll.state.memory_ledger import MemoryLedger
from atoll.state.tenants import Tenant


class MemoryQuota(enum.StrEnum):
    """A quota of memory. The value is its name in the settings of tenants."""

    PER_DEVICE = "memory"
    TOTAL = "total_memory"

    def limit(self, tenant: Tenant) -> int:
        """Return the bytes that the tenant may use; 0 without a limit."""
        settings = tenant.settings
        return settings.memory if self is MemoryQuota.PER_DEVICE else settings.total_memory

    def place(self, device: HostDevice) -> HostDevice | None:
        """Return the device whose bytes count if memory of `device` is needed; None if those of all devices count."""
        return device if self is MemoryQuota.PER_DEVICE else None

    def used(self, memory: MemoryLedger, device: HostDevice) -> int:
        """Return the bytes that a tenant uses of its quota where memory of `device` counts."""
        return memory.total if self.place(device) is None else memory.used_on(device)

    def lacking(
        self, memory: MemoryLedger, wanted: Sequence[MemoryRequirement], limit: int
    ) -> tuple[HostDevice, int] | None:
        """Return a device whose `wanted` memory exceeds the limit, and the bytes that count against it, or None."""
        if self is MemoryQuota.PER_DEVICE:
            device = memory.lacking(*wanted, limit=limit)
            return None if device is None else (device, dict(total(wanted))[device])
        sizes = total(wanted)
        nbytes = sum(size for _, size in sizes)
        return (sizes[0][0], nbytes) if sizes and memory.total + nbytes > limit else None


QUOTAS = tuple(MemoryQuota)
