"""The secret with which a client's process opens its own channel to a host, beside that of its proxy."""

from __future__ import annotations

import hmac


def script_secret(session_secret: str) -> str:
    """Return the secret for the client's process, from which the session's secret cannot be computed."""
    return hmac.digest(session_secret.encode(), b"channel of the client's process", "sha256").hex()
