"""The limits of a tenant as people read them: `atoll tenants` and the page show them."""

from __future__ import annotations

from collections.abc import Callable

from atoll.cluster.tenant_settings import TenantSettings
from atoll.quantities import counted, human_bytes
from atoll.telemetry.snapshot import TenantSnapshot

_DEFAULTS = TenantSettings("")


def _used_bytes(tenant: TenantSnapshot) -> int:
    """Return the bytes on the device on which the tenant has most."""
    return max((nbytes for _, nbytes in tenant.device_bytes), default=0)


# The texts of limits, for those that are set. A limit of something that is counted now has the count too.
TEXTS: dict[str, Callable[[TenantSnapshot], str]] = {
    "memory": lambda t: f"{human_bytes(_used_bytes(t))} of {human_bytes(t.memory)} per device",
    "total_memory": lambda t: f"{human_bytes(t.bytes)} of {human_bytes(t.total_memory)} in total",
    "disk": lambda t: f"{human_bytes(t.file_bytes)} of {human_bytes(t.disk)} in files",
    "sessions": lambda t: f"{t.open_sessions} of {t.sessions} sessions",
    "launches": lambda t: f"{t.in_flight} of {t.launches} launches",
    "devices": lambda t: counted(t.devices, "device"),
    "uploads": lambda t: counted(t.uploads, "upload"),
    "compiles": lambda t: counted(t.compiles, "compile"),
    "reserve": lambda t: f"{t.reserve} % reserved",
}
# The texts of limits with a default, for other values.
RATES: dict[str, Callable[[TenantSnapshot], str]] = {
    "launch_rate": lambda t: f"{t.launch_rate or 'any number of'} launches/s",
    "compile_seconds": lambda t: f"compiling {t.compile_seconds or 'any number of'} s/min",
    "upload_rate": lambda t: f"sending {human_bytes(t.upload_rate)}/s" if t.upload_rate else "sending at any rate",
    "run_seconds": lambda t: f"runs of {t.run_seconds or 'any number of'} s",
}


def limits_of(tenant: TenantSnapshot) -> list[str]:
    """Return the limits of a tenant that are not the default, and the use of those that count what it has now."""
    found = [f"suspended for {tenant.suspended_seconds:.0f} s"] if tenant.suspended_seconds else []
    found += [text(tenant) for name, text in TEXTS.items() if getattr(tenant, name)]
    return found + [text(tenant) for name, text in RATES.items() if getattr(tenant, name) != getattr(_DEFAULTS, name)]


def fullness(tenant: TenantSnapshot) -> float:
    """Return the part of its memory that a tenant uses, of the limit that is closest; 0 without a limit."""
    parts = [
        used / limit
        for used, limit in ((_used_bytes(tenant), tenant.memory), (tenant.bytes, tenant.total_memory))
        if limit
    ]
    return round(min(1.0, max(parts, default=0.0)), 3)
