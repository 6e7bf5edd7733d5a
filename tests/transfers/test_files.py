"""Files that are handed on by their descriptors, and what a client may do to them meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import StatusError
from atoll.transfers import files
from atoll.transfers.channel import DataChannel
from atoll.transfers.contents import read_file
from atoll.transfers.data_port import DataPort
from atoll.transfers.engine import Piece, TransferEngine
from atoll.transfers.inbox import Inbox
from atoll.transfers.kinds import KINDS, ONE_CLIENT_KINDS
from atoll.wire.address import Address
from tests.transfers.ends import SECONDS, Ends, Receiver, content

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
        sender.send_file(1, 2, nbytes, file.fileno())
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

a, b = map(DataChannel, socket.socketpair())
arrived, pieces = threading.Event(), []

def take(piece, content, done):
    pieces.append(content)
    arrived.set()

threading.Thread(target=b.receive, args=(take,), daemon=True).start()
descriptor = os.memfd_create("of a client")
os.write(descriptor, b"x" * 1_000_000)
a.send_file(1, 2, 1_000_000, descriptor)
assert arrived.wait(10)
os.ftruncate(descriptor, 0)
assert bytes(pieces[0]) == b"x" * 1_000_000
print("lives")
"""


def test_a_client_that_shortens_a_file_later_ends_no_other_process() -> None:
    """In a process of its own, which SIGBUS would end."""
    done = subprocess.run([sys.executable, "-c", SHORTENED_LATER], capture_output=True, text=True, timeout=60)
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

    monkeypatch.setattr(files, "read_file", shorten_and_read)
    port = DataPort(Address(path=str(short_directory / "data")), Inbox(on_arrival))
    port.open_session(5, "secret")
    channel = DataChannel.dial(port.address)
    channel.open(5, "secret")
    descriptor = os.memfd_create("of a client")
    os.ftruncate(descriptor, 5_000_000)
    channel.send_file(5, 1, 5_000_000, descriptor)
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
    channel.send_file(5, 1, 100_000, descriptor)
    assert arrived.wait(SECONDS)
    taken, _ = port.inbox.take(5, 1)
    os.pwrite(descriptor, b"y" * 100_000, 0)
    os.close(descriptor)
    assert bytes(taken) == (b"y" if is_mapped else b"x") * 100_000
    channel.close()
    port.close()


def test_what_is_announced_as_a_file_and_is_none_ends_the_channel(unix_ends: Ends) -> None:
    readable, writable = os.pipe()
    unix_ends[0].send_file(1, 2, 0, readable)
    error = Receiver(unix_ends[1]).join()
    assert "announced as a file and is none" in str(error)
    os.close(readable)
    os.close(writable)
