"""Channels over socket pairs, and a check that no descriptor is left open."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from atoll.transfers.channel import DataChannel
from atoll.transfers.transfer_kinds import KINDS
from tests.conftest import gone as still_there
from tests.transfers.ends import SECONDS, Ends, descriptors, tcp_pair


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = descriptors()
    yield
    # Threads of a data port close their ends a little later.
    found = still_there(lambda: ["descriptors"] if descriptors() > before else [])
    assert not found, f"{descriptors() - before} descriptors more than before"


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        pair = socket.socketpair() if request.param == "unix" else tcp_pair()
        channels = DataChannel(pair[0]), DataChannel(pair[1])
        for channel in channels:
            stack.callback(channel.close)
        yield channels


@pytest.fixture
def unix_ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Both ends of a channel, with `request.param` as their kinds of transfer."""
    a, b = (DataChannel(each, getattr(request, "param", KINDS)) for each in socket.socketpair())
    yield a, b
    a.close()
    b.close()


@pytest.fixture
def raw(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, DataChannel]]:
    """A bare socket, and the channel at its other end, with `request.param` as its kinds of transfer."""
    mine, theirs = socket.socketpair()
    mine.settimeout(SECONDS)
    channel = DataChannel(theirs, getattr(request, "param", KINDS))
    yield mine, channel
    mine.close()
    channel.close()
