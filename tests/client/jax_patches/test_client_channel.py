"""Tests of the client's channel: each call runs even if others block, and any result or exception is a reply."""

from __future__ import annotations

import gc
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import atoll
from atoll.client.jax_patches import client_channel as module
from atoll.client.jax_patches.client_channel import ClientChannel
from atoll.errors import ConnectError
from atoll.host_services.calls.call_messages import (
    GREETING,
    ArrayType,
    Arrived,
    Call,
    Dial,
    DirectWanted,
    Landed,
    Raised,
    Released,
    Returned,
    Unread,
    Wanted,
    Written,
    decode,
    encode,
    first_call,
)
from atoll.peers.data_port import DataPort
from atoll.peers.listener import Listener
from atoll.protocol.callbacks import CallbackAddress
from atoll.protocol.script_secrets import script_secret
from atoll.protocol.submission import first_feed
from atoll.transfers.channel import DataChannel, Open
from atoll.transfers.inbox import Inbox
from atoll.transfers.piece_contents import BufferContents
from atoll.wire.address import Address
from tests.transfers.ends import Receiver
from tests.waiting import until

SECONDS = 10.0
FEED = 77


class Channel:
    """Channel that keeps all sent messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any, list[bytes]]] = []

    def send(self, session: int, feed: int, contents: list[Any]) -> None:
        content = b"".join(bytes(part) for part in contents)
        message, offsets = decode(content)
        arrays = zip(message.arrays, offsets, strict=True)
        self.sent.append((feed, message, [content[offset : offset + each.nbytes] for each, offset in arrays]))


def answer(callback: Any, *arguments: Any, given_back: list[int] | None = None) -> tuple[Any, list[bytes]]:
    """Return a client_channel's reply to a call of `callback` with these arrays, where None represents a token."""
    client_channel, channel = ClientChannel(lambda client, payload: None), Channel()
    if callback is not None:
        client_channel._callbacks[5] = callback
    types = tuple(
        ArrayType("", (), 0) if each is None else ArrayType(each.dtype.name, each.shape, each.nbytes)
        for each in arguments
    )
    parts = encode(Call(5, types), [b"" if each is None else each.reshape(-1).view(np.uint8) for each in arguments])
    content = b"".join(bytes(part) for part in parts)
    call, offsets = decode(content)
    client_channel._call(channel, FEED, call, content, offsets, lambda: given_back is not None and given_back.append(1))  # type: ignore[arg-type]
    ((feed, message, results),) = channel.sent
    assert feed == FEED
    return message, results


def test_a_callable_gets_arrays_that_it_cannot_write_to_and_its_results_are_sent():
    given: list[Any] = []

    def callback(token: Any, x: Any) -> Any:
        given.append((token, x.tolist(), x.flags.writeable))
        return token, np.asarray(x[::-1])

    message, results = answer(callback, None, np.arange(3, dtype=np.int16))
    assert given == [(None, [0, 1, 2], False)]
    assert message == Returned((ArrayType("", (), 0), ArrayType("int16", (3,), 6)))
    assert results[1] == np.array([2, 1, 0], np.int16).tobytes()


def test_memory_of_the_channel_is_given_back_when_the_last_array_is_gone():
    given_back: list[int] = []
    kept: list[Any] = []
    answer(lambda x: kept.append(x) or (), np.zeros(1 << 20, np.uint8), given_back=given_back)
    assert not given_back
    kept.clear()
    gc.collect()
    assert given_back == [1]


@pytest.mark.parametrize("result", [7, (object(),)])
def test_a_result_that_is_no_array_is_an_error_of_the_callable(result: Any):
    message, _ = answer(lambda: result)
    assert isinstance(message, Raised)


def test_what_a_callable_raises_is_sent_with_the_users_frames_alone():
    def stumbles() -> None:
        raise SystemExit("mine")

    message, _ = answer(stumbles)
    assert message.text.startswith("Traceback (most recent call last):\n")
    assert "in stumbles" in message.text
    assert message.text.endswith("SystemExit: mine")
    assert "atoll/client/jax_patches/client_channel.py" not in message.text


def test_frames_of_a_directory_whose_name_begins_with_that_of_the_package_are_the_users():
    namespace: dict[str, Any] = {}
    exec(
        compile("def stumbles(): raise ValueError('mine')", f"{os.path.dirname(atoll.__file__)}_addons/a.py", "exec"),
        namespace,
    )

    message, _ = answer(namespace["stumbles"])
    assert "atoll_addons/a.py" in message.text


def test_a_number_that_nobody_has_is_answered():
    message, _ = answer(None)
    assert message.cancelled


def test_a_proxy_on_all_addresses_is_called_back_from_where_it_was_dialled() -> None:
    opened: list[Open] = []

    def serve(channel: DataChannel) -> None:
        opened.append(channel.receive_open())
        channel.send(0, first_call(0), encode(GREETING))
        channel.receive(lambda piece, content, done: done())

    listener = Listener(Address(host="127.0.0.2"), serve, lambda: None)
    where = CallbackAddress(f"0.0.0.0:{listener.address.port}", 11, "secret")
    loaded = SimpleNamespace(fingerprint=msgspec.json.encode(where))
    client_channel = ClientChannel(lambda client, payload: loaded)
    client_channel.proxy = Address(host="127.0.0.2", port=1)
    try:
        client_channel.add(None, [lambda: ()])
        assert [(each.session, each.secret) for each in opened] == [(11, "secret")]
    finally:
        client_channel.clear_cache()
        listener.close()


def test_a_proxy_that_does_not_greet_takes_no_callables() -> None:
    listener = Listener(Address(host="127.0.0.1"), lambda channel: None, lambda: None)
    where = CallbackAddress(str(listener.address), 11, "secret")
    loaded = SimpleNamespace(fingerprint=msgspec.json.encode(where))
    client_channel = ClientChannel(lambda client, payload: loaded)
    try:
        with pytest.raises(ConnectError, match="did not answer on a connection for callbacks"):
            client_channel.add(None, [lambda: ()])
        assert not len(client_channel)
    finally:
        listener.close()


class FarHost:
    """Proxy that lets its client connect to the data port of a host on another machine."""

    def __init__(self, directory: Path) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()  # messages of the client
        self.arrived: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.port = DataPort(Address(host="127.0.0.1"), Inbox(lambda *which: self.arrived.put(which)))
        self.port.open_session(5, "secret five")
        self.port.answers = SimpleNamespace(takes=lambda feed: False, fail=lambda session: None, unread=self._unread)  # type: ignore[assignment]
        self.to_client: DataChannel | None = None
        self._proxy = Listener(Address(path=str(directory / "proxy")), self._serve, lambda: None)
        where = CallbackAddress(str(self._proxy.address), 11, "secret")
        self.client_channel = ClientChannel(lambda client, payload: self._submit(payload, where))

    def _submit(self, payload: bytes, where: CallbackAddress) -> Any:
        return SimpleNamespace(fingerprint=msgspec.json.encode(where), execute_sharded=lambda arguments: None)

    def _serve(self, channel: DataChannel) -> None:
        channel.receive_open()
        self._proxy.opened(channel)
        channel.send(0, first_call(0), encode(GREETING))
        self.to_client = channel
        channel.receive(self._take)

    def _take(self, piece: Any, content: Any, done: Callable[[], None]) -> None:
        self.sent.put(decode(content)[0])
        done()

    def _unread(self, session: int, feed: int) -> None:
        self.notify(Unread((feed,)))

    def notify(self, message: Any) -> None:
        assert self.to_client is not None
        self.to_client.send(0, first_call(0), encode(message))

    def dial(self, host: int) -> Dial:
        return Dial(host, str(self.port.address), 5, script_secret("secret five"), 10.0)

    def let_dial(self) -> DataChannel:
        """Make the client connect, and return its channel when it is open."""
        self.notify(self.dial(3))
        until(lambda: 3 in self.client_channel.direct_channels.values() and 5 in self.port._scripts)
        (channel,) = self.client_channel.direct_channels
        return channel

    def __enter__(self) -> FarHost:
        assert self.client_channel.receives_from(None)
        until(lambda: self.to_client is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self.client_channel.clear_cache()
        self._proxy.close()
        self.port.close()


@pytest.fixture
def far(short_directory: Path) -> Iterator[FarHost]:
    with FarHost(short_directory) as host:
        yield host


DEVICE = SimpleNamespace(id=0, host=3, client=None)
VALUES = np.arange(1 << 20, dtype=np.uint8)


def test_contents_arrive_on_a_channel_that_the_client_has_dialed(far: FarHost) -> None:
    channel = far.let_dial()
    far.notify(Dial(3, str(far.port.address), 5, "of a channel that is open", 10.0))
    contents = far.client_channel.reads.start(None, [DEVICE], VALUES.nbytes, far.client_channel.reads.losses)
    assert far.port.send_to_script(5, first_feed(0), [BufferContents((memoryview(VALUES),))])
    np.testing.assert_array_equal(contents.wait(), VALUES)
    assert far.sent.get(timeout=SECONDS) == Arrived(first_feed(0))
    assert list(far.client_channel.direct_channels) == [channel]


def test_a_proxy_learns_of_contents_that_arrive_after_its_channel_was_replaced(far: FarHost) -> None:
    channel, before = far.let_dial(), far.to_client
    assert before is not None
    before.shut_down()
    until(lambda: far.client_channel.channel is not None and far.client_channel.channel.is_closed)
    far.client_channel.add(None, [lambda: ()])  # opens another channel
    until(lambda: far.to_client is not before)
    contents = far.client_channel.reads.start(None, [DEVICE], VALUES.nbytes, far.client_channel.reads.losses)
    assert far.port.send_to_script(5, first_feed(0), [BufferContents((memoryview(VALUES),))])
    np.testing.assert_array_equal(contents.wait(), VALUES)
    assert far.sent.get(timeout=SECONDS) == Arrived(first_feed(0))
    assert list(far.client_channel.direct_channels) == [channel]


def test_contents_are_sent_on_a_channel_that_the_client_has_dialed(far: FarHost) -> None:
    far.let_dial()
    far.client_channel.writes.start(VALUES, [DEVICE])
    far.notify(Wanted(first_feed(0), 77, 3))
    assert far.sent.get(timeout=SECONDS) == Landed(first_feed(0))
    assert far.arrived.get(timeout=SECONDS) == (5, 77)
    assert bytes(far.port.inbox.take(5, 77)[0]) == VALUES.tobytes()


def test_reads_end_with_a_dialed_channel_and_the_proxy_is_asked_for_another(
    far: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ASK_SECONDS", 0.0)
    channel = far.let_dial()
    assert far.client_channel.sends_to(DEVICE)
    contents = far.client_channel.reads.start(None, [DEVICE], VALUES.nbytes, far.client_channel.reads.losses)
    channel.shut_down()
    assert contents.wait() is None
    until(lambda: not far.client_channel._dialed and 5 not in far.port._scripts)
    assert far.sent.empty()
    assert not far.client_channel.sends_to(DEVICE)
    assert far.sent.get(timeout=SECONDS) == DirectWanted()
    far.let_dial()


def test_a_call_for_which_no_thread_can_start_is_answered_and_the_channel_stays(
    far: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    (number,) = far.client_channel.add(None, [lambda: ()])

    def refuse(call: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    assert far.to_client is not None
    with monkeypatch.context() as patch:
        patch.setattr(far.client_channel._threads, "run", refuse)
        far.to_client.send(0, first_call(4) + 1, encode(Call(number, ())))
        answered = far.sent.get(timeout=SECONDS)
    assert answered == Raised("no thread can call the function: can't start new thread")
    far.to_client.send(0, first_call(4) + 2, encode(Call(number, ())))
    assert far.sent.get(timeout=SECONDS) == Returned(())


def test_channels_for_which_no_thread_can_start_are_closed_and_the_proxy_stays(
    far: FarHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    ours, theirs = socket.socketpair()
    before = far.client_channel.direct_channels
    assert far.to_client is not None
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        far.client_channel._take_direct(ours, 4)
        far.client_channel._start_dialing(far.dial(5), far.client_channel.channel)  # type: ignore[arg-type]
    with theirs:
        assert theirs.recv(1) == b""
    assert far.client_channel.direct_channels == before
    assert 5 not in far.client_channel._dialed


def test_a_host_cannot_let_the_client_dial(far: FarHost, monkeypatch: pytest.MonkeyPatch) -> None:
    dialed: list[int] = []
    monkeypatch.setattr(far.client_channel, "_dial", lambda dial, proxy: dialed.append(dial.host))
    ours, theirs = socket.socketpair()
    host = DataChannel(theirs)
    receiver = Receiver(host)
    try:
        far.client_channel._take_direct(ours, 4)
        assert far.to_client is not None
        # The proxy forwards the contents of calls, which have the host's numbers.
        for number, (channel, feed) in enumerate(((host, first_call(0)), (far.to_client, first_call(4) + 1))):
            read = far.client_channel.reads.start(None, [DEVICE], VALUES.nbytes, far.client_channel.reads.losses)
            channel.send(0, feed, encode(far.dial(4)))
            channel.send(0, first_call(0), encode(Unread((first_feed(0) + number,))))
            assert read.wait() is None
        assert dialed == []
    finally:
        host.close()
        receiver.join()


def test_what_a_host_sends_as_a_call_is_no_notice(far: FarHost, monkeypatch: pytest.MonkeyPatch) -> None:
    acted: list[Any] = []
    for owner, name in (
        (far.client_channel, "remove"),
        (far.client_channel.reads, "fail"),
        (far.client_channel.writes, "send"),
        (far.client_channel.writes, "written"),
    ):
        monkeypatch.setattr(owner, name, lambda first, *_: acted.append(first))
    assert far.to_client is not None
    for feed, number in ((first_call(4) + 1, 1), (first_call(0), 2)):
        for message in (Released((number,)), Unread((number,)), Wanted(number, 77, 3), Written(number)):
            far.to_client.send(0, feed, encode(message))
    until(lambda: 2 in acted)
    assert acted == [(2,), (2,), Wanted(2, 77, 3), 2]


def test_a_host_that_cannot_be_dialed_is_reached_through_the_proxy(far: FarHost) -> None:
    far.notify(Dial(3, "127.0.0.1:1", 5, "secret", 10.0))
    far.let_dial()
