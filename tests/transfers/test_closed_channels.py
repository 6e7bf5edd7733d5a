"""Test that a closed channel frees the memory of its connections at once: processes collect garbage rarely."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from atoll.peers.data_port import DataPort
from atoll.security.roles import Role
from atoll.transfers.channel import DataChannel
from atoll.transfers.inbox import Inbox
from atoll.transfers.stream_transfers import CHUNK_BYTES
from atoll.transfers.streams import STREAMS
from atoll.wire.address import Address
from atoll.wire.byte_stream import SocketStream
from atoll.wire.tls.identity import Identity
from atoll.wire.tls.tls_stream import TlsSender, TlsStream
from tests.certificates import identity
from tests.transfers.ends import Receiver, content, tcp_pair
from tests.waiting import until

BOTH_ENDS = 2 * (1 + 2 * STREAMS)  # a channel, and its streams in each direction


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def streams() -> list[object]:
    """Return the byte streams that exist in this process."""
    return [each for each in gc.get_objects() if isinstance(each, SocketStream | TlsStream | TlsSender)]


@pytest.mark.parametrize("has_tls", [False, True], ids=["tcp", "tls"])
@pytest.mark.parametrize("ends", ["host", "client"])
def test_a_closed_channel_frees_its_connections_without_a_collection(
    no_collections: None, ends: str, has_tls: bool
) -> None:
    def identity_of(role: Role) -> Identity | None:
        return identity(role) if has_tls else None

    before = len(streams())
    inbox = Inbox(lambda *_: None)
    with contextlib.ExitStack() as stack:
        port = DataPort(Address(host="127.0.0.1", tls=has_tls), inbox, identity=identity_of(Role.HOST))
        stack.callback(port.close)
        port.open_session(5, "secret")
        channel = DataChannel.connect(port.address, 5, "secret", identity_of(Role.CLIENT))
        stack.callback(channel.close)
        receiver = Receiver(channel)
        peer = port.to_proxy(5)
        until(lambda: send_both_ways(channel, peer) and len(streams()) - before == BOTH_ENDS)
        if ends == "host":
            port.close_session(5)
            receiver.join()
        channel.close()
        until(lambda: len(streams()) == before)


def send_both_ways(channel: DataChannel, peer: DataChannel) -> bool:
    for each in (channel, peer):
        each.send(5, 1, [content(4 * CHUNK_BYTES)])
    return True


def left_of(send: Callable[[np.ndarray], None], nbytes: int) -> object | None:
    """Return the contents of a transfer that fails, or None if they were freed."""
    contents = content(nbytes)
    left = weakref.ref(contents)
    with contextlib.suppress(OSError):
        send(contents)
        pytest.fail("the transfer did not fail")
    del contents
    return left()


@pytest.mark.parametrize("nbytes", [100, CHUNK_BYTES])
@pytest.mark.parametrize("end", ["close", "silence"])
def test_a_channel_that_ended_keeps_no_contents_of_a_later_transfer(
    no_collections: None, end: str, nbytes: int
) -> None:
    ends = [DataChannel(each) for each in tcp_pair()]
    if end == "close":
        ends[0].close()
    else:
        ends[0].fail(TimeoutError("the other side was silent"))
    assert left_of(lambda contents: ends[0].send(1, 2, [contents]), nbytes) is None
    for each in ends:
        each.close()


def test_a_channel_that_is_closed_keeps_no_contents_of_a_transfer_that_waits(no_collections: None) -> None:
    ends = [DataChannel(each) for each in tcp_pair()]  # nothing reads the other end
    closing = threading.Timer(0.3, ends[0].close)
    closing.start()
    assert left_of(lambda contents: ends[0].send(1, 2, [contents]), CHUNK_BYTES) is None
    closing.join()
    for each in ends:
        each.close()


def test_a_channel_that_failed_keeps_no_frame_of_its_error(no_collections: None) -> None:
    ends = [DataChannel(each) for each in tcp_pair()]

    def fail(contents: np.ndarray) -> None:
        try:
            raise TimeoutError("the other side was silent")
        except TimeoutError as error:
            ends[0].fail(error)
            raise

    assert left_of(fail, 1) is None
    for each in ends:
        each.close()
