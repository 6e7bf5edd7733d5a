"""The sandbox mechanisms of a system; see `isolation.probe`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

INSECURE_OPTION = "--insecure-sandbox"


class Namespaces(StrEnum):
    """The way to make the namespaces of a sandbox."""

    BY_ROOT = "made by root"
    BY_USER = "in a user namespace"  # by any user
    NONE = "none"


class Mechanisms(msgspec.Struct, frozen=True):
    """The mechanisms that confine users' Python and work on a system."""

    namespaces: Namespaces = Namespaces.NONE  # how they are made
    own_user: bool = False  # whether each sandbox has its own user ID
    seccomp: bool = False  # whether system calls are filtered
    landlock: int = 0  # version of Landlock; 0: not available
    missing: dict[str, str] = {}  # why a mechanism does not work, by the name of the mechanism

    @property
    def confine_files(self) -> bool:
        """Return whether files can be confined. If not, code of tenants must not run."""
        return self.namespaces is not Namespaces.NONE or self.landlock > 0


def why_not_confined(mechanisms: Mechanisms) -> str:
    """Return why these mechanisms cannot confine tenants' Python, and what to do; "" if they can."""
    if mechanisms.confine_files:
        return ""
    missing = "; ".join(f"{name}: {reason}" for name, reason in mechanisms.missing.items())
    return (
        f"this system cannot keep tenants' Python away from each other's files ({missing}). Allow user namespaces "
        f"(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns) or Landlock (lsm=landlock), "
        f"or start the cluster with {INSECURE_OPTION}"
    )
