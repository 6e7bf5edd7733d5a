"""The certificate with which an engine process connects to the controllers of its cluster."""

from __future__ import annotations

from pathlib import Path

from atoll.security.enrollment import Renewal
from atoll.security.roles import Role
from atoll.security.start_security import load_certificate_authority
from atoll.wire.tls.identity import Identity


class EngineIdentity:
    """An identity that the cluster's own CA issues, since there is no join token for engines.

    It is made at the first use and renewed until `close`, since an engine also connects to controllers that are
    restarted or that take over later. `directory` is the cluster's private directory, and `name` is for messages.
    """

    def __init__(self, directory: str | Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._identity: Identity | None = None
        self._renewal: Renewal | None = None

    def get(self) -> Identity:
        """Return the identity, always the same. Raise AccessError or SettingsError."""
        if self._identity is None:
            authority = load_certificate_authority(self._directory)
            self._identity = Identity(authority.certificate_for(Role.ENGINE, self._name))
            self._renewal = Renewal(self._identity, lambda: authority.certificate_for(Role.ENGINE, self._name))
        return self._identity

    def close(self) -> None:
        """Stop renewing the certificate."""
        if self._renewal is not None:
            self._renewal.close()
