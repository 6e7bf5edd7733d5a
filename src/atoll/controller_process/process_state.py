"""The state from which another process continues a controller and its connections, as bytes."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from atoll.controller.controller_dumps import dump_controller, load_controller
from atoll.controller.core import Controller
from atoll.state.versions import decode_versioned, encode_versioned
from atoll.wire.resumption.link_record import LinkRecord


class ShellState(msgspec.Struct):
    """The state that another process needs besides the controller to continue the connections."""

    seconds: float = 0.0  # of the monotonic clock
    next: int = 1  # number of a connection
    key: bytes = msgspec.field(default_factory=lambda: os.urandom(32))  # of the secrets that resume connections
    links: list[LinkRecord] = []
    others: dict[int, str] = {}  # roles of connections that end with the process
    timers: dict[int, float] = {}  # when they are due


# Increase the first number if you change `ShellState` or `LinkRecord`: see CONTRIBUTING.md.
_SHELL, _SHELL_VERSION = "shell", (1, 1)


def encode_shell(state: ShellState) -> bytes:
    return encode_versioned(_SHELL, _SHELL_VERSION, state)


def decode_shell(content: bytes | msgspec.Raw) -> ShellState:
    """Return the state that `encode_shell` encoded. Raises JournalError if it cannot be read."""
    return decode_versioned(content, _SHELL, _SHELL_VERSION, ShellState)


class _Snapshot(msgspec.Struct, frozen=True):
    shell: msgspec.Raw
    controller: Any


class _StoredSnapshot(_Snapshot, frozen=True):
    controller: msgspec.Raw


_SNAPSHOT, _SNAPSHOT_VERSION = "snapshot", (1, 1)


def encode_snapshot(controller: Controller, state: ShellState) -> bytes:
    """Return the payload of a snapshot."""
    snapshot = _Snapshot(msgspec.Raw(encode_shell(state)), dump_controller(controller))
    return encode_versioned(_SNAPSHOT, _SNAPSHOT_VERSION, snapshot)


def decode_snapshot(payload: bytes) -> tuple[Controller, ShellState]:
    """Return the controller and the state of its connections. Raises JournalError if they cannot be read."""
    found = decode_versioned(payload, _SNAPSHOT, _SNAPSHOT_VERSION, _StoredSnapshot)
    return load_controller(found.controller), decode_shell(found.shell)
