"""The sandbox mechanisms of a system. `probe` determines them once per machine."""

from __future__ import annotations

from enum import StrEnum

import msgspec

INSECURE_OPTION = "--insecure-sandbox"


class Namespaces(StrEnum):
    """How the namespaces of a sandbox are made."""

    BY_ROOT = "made by root"
    BY_USER = "in a user namespace"  # by anybody
    NONE = "none"


class Mechanisms(msgspec.Struct, frozen=True):
    """The mechanisms that work here. `missing` gives the reason for each that does not, by its name."""

    namespaces: Namespaces = Namespaces.NONE
    own_user: bool = False  # a user ID of the sandbox's own
    seccomp: bool = False
    landlock: int = 0  # the version
    missing: dict[str, str] = {}

    @property
    def confine_files(self) -> bool:
        """Whether a tenant's code can be kept from other files: without this it must not run."""
        return self.namespaces is not Namespaces.NONE or self.landlock > 0


def why_not_confined(mechanisms: Mechanisms) -> str:
    """Return why tenants' Python cannot be confined by these mechanisms, and what to do; "" if it can."""
    if mechanisms.confine_files:
        return ""
    missing = "; ".join(f"{name}: {reason}" for name, reason in mechanisms.missing.items())
    return (
        f"this system cannot keep the Python of tenants from each other's files ({missing}). Allow user namespaces "
        f"(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns) or Landlock (lsm=landlock), "
        f"or start the cluster with {INSECURE_OPTION}"
    )
