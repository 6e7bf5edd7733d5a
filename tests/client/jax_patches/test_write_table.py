"""Tests of contents that this process sends to hosts: they reach the right host, and are kept as long as needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.client.jax_patches.write_table import WriteTable
from atoll.errors import Code, StatusError
from atoll.host_services.calls.call_messages import Landed, Wanted
from atoll.host_services.calls.call_messages import decode as decode_message
from atoll.ir.types import REPLICATED
from atoll.protocol.submission import PutArray, Writing, decode, first_feed

CLIENT = object()
DEVICE = SimpleNamespace(id=4, client=CLIENT)
X = np.arange(6, dtype=np.int16).reshape(2, 3)


class Channel:
    """Channel that records all messages. `on_end` ends the transfer in chunks."""

    def __init__(self, *, fails: bool = False, has_threads: bool = True) -> None:
        self.fails = fails
        self.has_threads = has_threads
        self.sent: list[tuple[int, bytes]] = []
        self.notices: list[Any] = []
        self.on_end: Callable[[BaseException | None], None] = lambda error: None
        self.is_closed = False

    def start_in_chunks(self, session: int, feed: int, contents: Any, on_end: Any) -> None:
        if self.fails:
            raise BrokenPipeError
        if not self.has_threads:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        self.sent.append((feed, b"".join(map(bytes, contents.views()))))
        assert contents.launch == feed
        self.on_end = on_end

    def send_in_parts(self, session: int, feed: int, content: Any) -> None:
        if self.fails:
            raise BrokenPipeError
        if not self.has_threads:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        self.sent.append((feed, bytes(content)))

    def send(self, session: int, feed: int, contents: list[Any]) -> None:
        self.notices.append(decode_message(b"".join(contents))[0])

    def shut_down(self) -> None:
        self.is_closed = True


class Server:
    """Server that keeps the programs of its executables, and the number of each run."""

    def __init__(self) -> None:
        self.writings: list[Writing] = []
        self.runs: list[int] = []
        self.fails = False

    def submit(self, client: Any, payload: bytes) -> Any:
        writing = decode(payload)
        assert isinstance(writing, Writing)
        self.writings.append(writing)
        return SimpleNamespace(execute_sharded=lambda arguments: self._run(writing.number))

    def _run(self, number: int) -> None:
        if self.fails:
            raise RuntimeError("no connection")
        self.runs.append(number)


class InterruptedOnce(dict[int, Any]):
    """Dictionary that raises KeyboardInterrupt when the first item is stored."""

    is_interrupted = False

    def __setitem__(self, key: int, value: Any) -> None:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        super().__setitem__(key, value)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def table(server: Server) -> WriteTable:
    return WriteTable(server.submit, lambda call: call())


def test_arrays_of_one_type_have_one_executable(server: Server, table: WriteTable) -> None:
    table.start(X, [DEVICE])
    table.start(X + 1, [DEVICE])
    table.start(X[:1], [DEVICE])
    assert server.writings == [
        Writing((4,), 0, PutArray("int16", (2, 3)), REPLICATED),
        Writing((4,), 1, PutArray("int16", (1, 3)), REPLICATED),
    ]
    assert server.runs == [0, 0, 1]


def test_contents_are_sent_to_the_host_and_kept_until_they_are_not_needed(table: WriteTable) -> None:
    table.start(X, [DEVICE])
    write, direct, proxy = first_feed(0), Channel(), Channel()
    table.send(Wanted(write, 9, 0), direct, proxy)  # type: ignore[arg-type]
    assert direct.sent == [(9, X.tobytes())]
    assert not proxy.notices
    direct.on_end(None)
    assert proxy.notices == [Landed(write)]
    assert len(table) == 1
    table.written(write)
    assert len(table) == 0


def test_without_a_direct_channel_contents_are_sent_to_the_proxy(table: WriteTable) -> None:
    table.start(X, [DEVICE])
    write, proxy = first_feed(0), Channel()
    table.send(Wanted(write, 9, 0), None, proxy)  # type: ignore[arg-type]
    table.send(Wanted(write, 9, 0), Channel(fails=True), proxy)  # type: ignore[arg-type]
    table.send(Wanted(write, 9, 0), Channel(has_threads=False), proxy)  # type: ignore[arg-type]
    assert proxy.sent == [(write, X.tobytes())] * 3
    assert not proxy.notices


def test_contents_that_a_broken_direct_channel_lost_are_sent_to_the_proxy(table: WriteTable) -> None:
    table.start(X, [DEVICE])
    write, direct, proxy = first_feed(0), Channel(), Channel()
    table.send(Wanted(write, 9, 0), direct, proxy)  # type: ignore[arg-type]
    direct.on_end(BrokenPipeError())
    assert proxy.sent == [(write, X.tobytes())]


def test_a_host_that_refuses_contents_has_them_as_an_error(table: WriteTable) -> None:
    table.start(X, [DEVICE])
    write, direct, proxy = first_feed(0), Channel(), Channel()
    table.send(Wanted(write, 9, 0), direct, proxy)  # type: ignore[arg-type]
    direct.on_end(StatusError(Code.RESOURCE_EXHAUSTED, "no memory"))
    assert (proxy.notices, proxy.sent) == ([Landed(write)], [])


@pytest.mark.parametrize("proxy", [Channel(fails=True), Channel(has_threads=False)], ids=["broken", "no thread"])
def test_a_proxy_that_cannot_receive_contents_is_disconnected(table: WriteTable, proxy: Channel) -> None:
    table.start(X, [DEVICE])
    table.send(Wanted(first_feed(0), 9, 0), None, proxy)  # type: ignore[arg-type]
    assert proxy.is_closed


def test_contents_that_were_forgotten_are_answered_without_bytes(table: WriteTable) -> None:
    table.start(X, [DEVICE])
    table.clear()
    direct, proxy = Channel(), Channel()
    table.send(Wanted(first_feed(0), 9, 0), direct, proxy)  # type: ignore[arg-type]
    assert proxy.sent == [(first_feed(0), b"")]
    assert not direct.sent


def test_after_an_interrupt_before_a_run_the_counts_of_client_and_server_agree(
    server: Server, table: WriteTable
) -> None:
    table.start(X, [DEVICE])
    table._contents = InterruptedOnce()
    with pytest.raises(KeyboardInterrupt):
        table.start(X, [DEVICE])
    assert len(table) == 0
    table.start(X, [DEVICE])
    assert server.runs == [0, 1]
    assert list(table._contents) == [first_feed(1)], "the first run of the second executable"


def test_contents_of_a_run_that_failed_are_not_kept(server: Server, table: WriteTable) -> None:
    server.fails = True
    with pytest.raises(RuntimeError, match="no connection"):
        table.start(X, [DEVICE])
    assert len(table) == 0
