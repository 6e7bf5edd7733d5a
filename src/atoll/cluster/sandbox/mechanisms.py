"""The sandbox mechanisms of a system. `probe` determines them once per machine."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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
