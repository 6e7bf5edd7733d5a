"""Files that are handed on by their descriptors, and what a client may do to them meanwhile."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import StatusError
from atoll.peers.data_port import DataPort
from atoll.transfers import file_engine
from atoll.transfers.channel import DataChannel
from atoll.transfers.file_engine import FileEngine
from atoll.transfers.inbox import Inbox
from atoll.transfers.piece_contents import FileContents, read_file
from atoll.transfers.transfer_engine import Piece, TransferEngine
from atoll.transfers.transfer_kinds import KINDS, ONE_CLIENT_KINDS
from atoll.wire.address import Address
from tests.transfers.ends import SECONDS, Ends, Receiver, content, is_closed
from tests.waiting import until

Kinds = Sequence[type[TransferEngine]]


@pytest.mark.parametrize("kinds", [KINDS, ONE_CLIENT_KINDS])
@pytest.mark.parametrize("nbytes", [0, 5, 100_000])
def test_a_file_goes_by_its_descriptor_and_stays_as_it_is(short_directory: Path, nbytes: int, kinds: Kinds) -> None:
    sender, receiver = (DataChannel(end, kinds) for end in socket.socketpair())
    path = short_directory / "file"
    path.write_bytes(content(nbytes).tobytes() + b"and more")
    taken = []
    done = threading.Event()

    def take(piece: Piece, got: Any, finish: Callable[[], None]) -> None:
        if nbytes:
            got[0] += 1  # a private mapping: the array of it may be written over
        taken.append(bytes(got))
        done.set()

    thread = threading.Thread(target=receiver.receive, args=(take,), daemon=True)
    thread.start()
    with open(path, "rb") as file:
        sender.send_contents(1, 2, FileContents(nbytes, file.fileno()))
    assert done.wait(SECONDS)
    assert taken[0][1:] == content(nbytes).tobytes()[1:]
    assert path.read_bytes() == content(nbytes).tobytes() + b"and more"
    sender.close()
    thread.join(SECONDS)
    receiver.close()


SHORTENED_LATER = """
import os, socket, threading
import numpy as np
from atoll.transfers.channel import DataChannel
from atoll.transfers.piece_contents import FileContents

a, b = map(DataChannel, socket.socketpair())
arrived, pieces = threading.Event(), []

def take(piece, content, done):
    pieces.append(content)
    arrived.set()

threading.Thread(target=b.receive, args=(take,), daemon=True).start()
descriptor = os.memfd_create("of a client")
os.write(descriptor, b"x" * 1_000_000)
a.send_contents(1, 2, FileContents(1_000_000, descriptor))
assert arrived.wait(10)
os.ftruncate(descriptor, 0)
assert bytes(pieces[0]) == b"x" * 1_000_000
print("lives")
"""


def test_a_client_that_shortens_a_file_later_ends_no_other_process() -> None:
    """Run in a separate process, which SIGBUS would end."""
    done = subprocess.run([sys.executable, "-c", SHORTENED_LATER], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def test_a_file_that_is_shortened_while_it_is_read_fails_its_feed_alone(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[tuple[int, int]] = []
    changed = threading.Condition()

    def on_arrival(session: int, feed: int) -> None:
        with changed:
            arrived.append((session, feed))
            changed.notify()

    def shorten_and_read(descriptor: int, target: memoryview) -> None:
        os.ftruncate(descriptor, 1000)
        read_file(descriptor, target)

    monkeypatch.setattr(file_engine, "read_file", shorten_and_read)
    port = DataPort(Address(path=str(short_directory / "data")), Inbox(on_arrival))
    port.open_session(5, "secret")
    channel = DataChannel.dial(port.address)
    channel.open(5, "secret")
    descriptor = os.memfd_create("of a client")
    os.ftruncate(descriptor, 5_000_000)
    channel.send_contents(5, 1, FileContents(5_000_000, descriptor))
    os.close(descriptor)
    channel.send(5, 2, [b"next"])
    with changed:
        assert changed.wait_for(lambda: len(arrived) == 2, SECONDS)
    assert arrived == [(5, 1), (5, 2)]
    with pytest.raises(StatusError, match="DATA_LOSS: a file of 5000000 bytes was shortened to 1000"):
        port.inbox.take(5, 1)
    assert bytes(port.inbox.take(5, 2)[0]) == b"next"
    channel.close()
    port.close()


@pytest.mark.parametrize(("kinds", "is_mapped"), [(KINDS, False), (ONE_CLIENT_KINDS, True)])
def test_only_a_data_port_of_one_client_maps_its_file(short_directory: Path, kinds: Kinds, is_mapped: bool) -> None:
    arrived = threading.Event()
    port = DataPort(Address(path=str(short_directory / "data")), Inbox(lambda *_: arrived.set()), kinds)
    port.open_session(5, "secret")
    channel = DataChannel.dial(port.address)
    channel.open(5, "secret")
    descriptor = os.memfd_create("of a client")
    os.write(descriptor, b"x" * 100_000)
    channel.send_contents(5, 1, FileContents(100_000, descriptor))
    assert arrived.wait(SECONDS)
    taken, _ = port.inbox.take(5, 1)
    os.pwrite(descriptor, b"y" * 100_000, 0)
    os.close(descriptor)
    assert bytes(taken) == (b"y" if is_mapped else b"x") * 100_000
    channel.close()
    port.close()


def files_here() -> list[str]:
    """The clients' files of which this process has descriptors."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [each for each in found if "memfd:of a client" in each]


class Waiting:
    """A data port whose sessions may hold 100,000 bytes, and a channel of one to it."""

    def __init__(self, directory: Path, kinds: Kinds = KINDS) -> None:
        self.arrived: list[int] = []
        self._changed = threading.Condition()
        self.has_memory = True
        self.inbox = Inbox(self._on_arrival, max_bytes=100_000, has_memory=lambda nbytes: self.has_memory)
        self.port = DataPort(Address(path=str(directory / "data")), self.inbox, kinds)
        self.port.open_session(5, "secret")
        self.channel = DataChannel.dial(self.port.address)
        self.channel.open(5, "secret")

    def _on_arrival(self, session: int, feed: int) -> None:
        with self._changed:
            self.arrived.append(feed)
            self._changed.notify()

    def wait(self, count: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.arrived) >= count, SECONDS)
            return self.arrived

    def send(self, feed: int, nbytes: int = 80_000, launch: int = 0) -> None:
        descriptor = os.memfd_create("of a client")
        os.write(descriptor, content(nbytes, feed).tobytes())
        self.channel.send_contents(5, feed, FileContents(nbytes, descriptor, launch))
        os.close(descriptor)

    def close(self) -> None:
        self.channel.close()
        self.port.close()


@pytest.fixture
def waiting(short_directory: Path, request: pytest.FixtureRequest) -> Iterator[Waiting]:
    made = Waiting(short_directory, getattr(request, "param", KINDS))
    yield made
    made.close()


def test_files_beyond_the_bound_of_their_session_wait_and_hold_nothing_up(waiting: Waiting) -> None:
    for feed in (1, 2, 3):
        waiting.send(feed)
    waiting.channel.send(5, 4, [b"small"])
    assert waiting.wait(2) == [1, 4]
    assert waiting.inbox.statistics().waiting == 2
    for feed in (1, 2, 3):
        until(lambda feed=feed: feed in waiting.arrived)  # type: ignore[misc]
        assert waiting.inbox.nbytes <= 100_000
        assert bytes(waiting.inbox.take(5, feed)[0]) == content(80_000, feed).tobytes()
    assert waiting.inbox.statistics().waiting == 0


def test_a_file_that_was_shortened_while_it_waited_fails_its_feed_alone(waiting: Waiting) -> None:
    waiting.send(1)
    descriptor = os.memfd_create("of a client")
    os.ftruncate(descriptor, 80_000)
    waiting.channel.send_contents(5, 2, FileContents(80_000, descriptor))
    waiting.send(3)
    waiting.wait(1)
    os.ftruncate(descriptor, 10)
    os.close(descriptor)
    waiting.inbox.take(5, 1)
    assert sorted(waiting.wait(3)) == [1, 2, 3]
    with pytest.raises(StatusError, match="DATA_LOSS"):
        waiting.inbox.take(5, 2)
    assert waiting.inbox.take(5, 3)[0][:3].tobytes() == content(3, 3).tobytes()


def test_a_file_that_cannot_be_read_fails_its_feed_alone(waiting: Waiting, short_directory: Path) -> None:
    """Otherwise, a client could end the process of a host with a file that waits, because a thread reads that."""
    path = short_directory / "file"
    path.write_bytes(bytes(80_000))
    with open(path, "ab") as only_written:
        for feed in (1, 3):
            waiting.channel.send_contents(5, feed, FileContents(80_000, only_written.fileno()))
            waiting.send(feed + 1)
    for feed in (1, 2, 3, 4):
        until(lambda feed=feed: feed in waiting.arrived)  # type: ignore[misc]
        if feed % 2:
            with pytest.raises(StatusError, match="DATA_LOSS: a file of 80000 bytes cannot be read"):
                waiting.inbox.take(5, feed)
        else:
            waiting.inbox.take(5, feed)


def test_files_that_claim_one_launch_are_refused_without_memory_and_leave_nothing(waiting: Waiting) -> None:
    waiting.has_memory = False
    for feed in (1, 2, 3):
        waiting.send(feed, launch=1)
    assert waiting.wait(3) == [1, 2, 3]
    assert waiting.inbox.nbytes == 80_000
    for feed in (2, 3):
        with pytest.raises(StatusError, match="too little memory left"):
            waiting.inbox.take(5, feed)


def test_files_that_wait_when_their_channel_ends_leave_nothing(waiting: Waiting) -> None:
    waiting.send(1)
    waiting.wait(1)
    until(lambda: len(files_here()) == 0)
    for feed in (2, 3):
        waiting.send(feed)
    until(lambda: waiting.inbox.statistics().waiting == len(files_here()) == 2)
    waiting.port.close_session(5)
    until(lambda: waiting.inbox.statistics().waiting == len(files_here()) == 0)
    waiting.inbox.drop_session(5)
    assert waiting.inbox.nbytes == 0


class FewWaiting(FileEngine):
    max_waiting = 1
    has_memory = staticmethod(lambda nbytes: nbytes <= 80_000)


@pytest.mark.parametrize("waiting", [[FewWaiting if kind is FileEngine else kind for kind in KINDS]], indirect=True)
def test_a_file_that_may_not_wait_fails_without_memory(waiting: Waiting) -> None:
    for feed, nbytes in ((1, 80_000), (2, 80_000), (3, 80_001), (4, 80_000)):
        waiting.send(feed, nbytes)
    assert waiting.wait(3) == [1, 3, 4]
    with pytest.raises(StatusError, match="1 files wait at this host"):
        waiting.inbox.take(5, 3)
    assert bytes(waiting.inbox.take(5, 4)[0]) == content(80_000, 4).tobytes()


def test_a_file_that_has_waited_and_is_too_much_then_ends_its_channel_alone(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can replace a feed whose file is being read. The thread that reads it must not end the process."""
    is_read, may_end = threading.Event(), threading.Event()
    errors: list[object] = []

    def slow(*arguments: Any) -> None:
        read_file(*arguments)
        is_read.set()
        assert may_end.wait(SECONDS)

    waiting.send(1)
    waiting.wait(1)
    monkeypatch.setattr(file_engine, "read_file", slow)
    monkeypatch.setattr(threading, "excepthook", errors.append)
    waiting.send(2)
    until(lambda: waiting.inbox.statistics().waiting == 1)
    waiting.inbox.take(5, 1)
    assert is_read.wait(SECONDS)
    for feed in (2, 3, 4):
        waiting.channel.send(5, feed, [content(100_000)])
    waiting.wait(4)
    may_end.set()
    assert is_closed(waiting.channel._socket._socket)
    until(lambda: all(each.name != "atoll-file" for each in threading.enumerate()))
    assert errors == []


def test_what_is_announced_as_a_file_and_is_none_ends_the_channel(unix_ends: Ends) -> None:
    readable, writable = os.pipe()
    unix_ends[0].send_contents(1, 2, FileContents(0, readable))
    error = Receiver(unix_ends[1]).join()
    assert "announced as a file is not one" in str(error)
    os.close(readable)
    os.close(writable)
