"""Connections that are cut as by a network that is lost."""

from __future__ import annotations

from typing import Any

from atoll.wire.connection import Connection
from atoll.wire.resumption.resumable_connection import ResumableConnection


def cut(connection: Connection | ResumableConnection[Any]) -> None:
    """Cut a connection at once, on its event loop. A resumable connection can continue."""
    transport = connection._transport if isinstance(connection, ResumableConnection) else connection
    assert transport is not None, "it is away"
    assert transport._transport is not None
    transport._transport.abort()
