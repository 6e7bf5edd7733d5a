"""Tests of a session's data channels when hosts fail and return."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConnectError, Status
from atoll.host_services.calls.call_messages import NO_CLIENT, ReadWanted, encode, first_call
from atoll.session import channels
from atoll.session.channels import Channels
from atoll.transfers.channel import DataChannel
from atoll.transfers.transfer_engine import Piece
from atoll.wire.address import Address
from tests.waiting import until_async

REPORT_SECONDS = 0.3
CONTROLLER = Address(path="/nowhere")


class FakeChannel:
    """Channel that receives nothing until it breaks or is closed, and records all sent messages."""

    passes_files = is_local = takes_reads = has_space = True
    liveness = None  # as on one machine

    def __init__(self) -> None:
        self._over = threading.Event()
        self.sent: list[tuple[int, Any]] = []
        self.calls: list[int] = []  # the feeds of the calls that arrive

    def start(self, session: int, feed: int, contents: Any, on_end: Any) -> None:
        self.sent.append((feed, [bytes(view) for view in contents.views()]))
        on_end(None)

    def can_send_nowait(self, nbytes: int) -> bool:
        return self.has_space

    def receive(self, on_piece: Any, on_failure: Any = None, on_socket: Any = None) -> None:
        for feed in self.calls:
            on_piece(Piece(1, feed, 0), b"", lambda: None)
        self._over.wait(20)

    def send(self, session: int, feed: int, contents: Any) -> None:
        self.sent.append((feed, contents))

    @property
    def is_closed(self) -> bool:
        return self._over.is_set()

    def close(self) -> None:
        self._over.set()


class Rig:
    """Channels whose connection attempts end as `dial(host's address)` returns, and their reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lease: float = 10.0) -> None:
        monkeypatch.setattr(channels, "_REPORT_SECONDS", REPORT_SECONDS)
        monkeypatch.setattr(DataChannel, "connect", lambda address, *_, **__: self.dial(address.path))
        self.dial: Callable[[str], Any] = lambda path: self.latest
        self.latest = FakeChannel()
        self.broken: list[Status] = []
        loop = asyncio.get_running_loop()
        self.may_miss_losses = False
        self.channels = Channels(
            loop,
            1,
            "secret",
            CONTROLLER,
            on_feed=lambda *_: None,
            on_broken=self.broken.append,
            awaits=lambda: False,
            lease=lease,
            may_miss_losses=lambda: self.may_miss_losses,
        )

    async def connect(self, *hosts: int, patience: float = 0.0) -> dict[int, ConnectError]:
        connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.channels.connect([(host, f"unix:/{host}") for host in hosts], connected.set_result, patience)
        return dict(await connected)

    async def open(self) -> None:
        self.latest = FakeChannel()
        assert not await self.connect(0)

    async def break_it(self) -> None:
        self.latest.close()
        await until_async(lambda: not self.channels.is_local(0))  # the loop knows it


def test_a_channel_that_breaks_alone_is_reported(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        await rig.open()
        await rig.break_it()
        assert not rig.broken
        await asyncio.sleep(REPORT_SECONDS)
        assert len(rig.broken) == 1
        rig.channels.close()

    asyncio.run(play())


def test_a_host_that_is_lost_again_as_soon_as_it_is_back_ends_no_session(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        await rig.open()
        await rig.break_it()
        rig.channels.disconnect((0,))
        await rig.open()
        await asyncio.sleep(REPORT_SECONDS - 0.1)
        await rig.break_it()  # the controller reports this one after the time of the first break is over
        await asyncio.sleep(0.1)
        rig.channels.disconnect((0,))
        await asyncio.sleep(REPORT_SECONDS)
        assert not rig.broken
        rig.channels.close()

    asyncio.run(play())


def test_uploads_that_a_lost_host_may_not_have_used_are_sent_again_once(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        await rig.open()
        first = rig.latest
        rig.channels.upload((0,), 1, [b"source"])  # of a function: for no launch
        rig.channels.upload((0,), 2, [b"early"], launch=2)
        await rig.break_it()
        rig.channels.upload((0,), 3, [b"late"], launch=3)
        assert rig.channels.disconnect((0,)) == [(0, 2), (0, 3)]
        rig.channels.upload((0,), 4, [b"after"], launch=4)
        assert rig.channels.disconnect((0,)) == [(0, 2), (0, 3), (0, 4)], "it was lost again"
        await rig.open()
        assert first.sent == [(1, [b"source"]), (2, [b"early"])]
        assert rig.latest.sent == [(2, [b"early"]), (3, [b"late"]), (4, [b"after"])]
        rig.channels.forget_uploads()
        assert rig.channels.disconnect((0,)) == []
        rig.channels.close()

    asyncio.run(play())


def test_while_the_controller_is_not_heard_it_reports_no_loss_and_gets_the_time_to_miss_a_host(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(channels, "_LOOK_SECONDS", 0.05)

    async def play(is_reported: bool) -> None:
        rig = Rig(monkeypatch, lease=0.5)
        await rig.open()
        rig.may_miss_losses = True
        await rig.break_it()
        await asyncio.sleep(3 * REPORT_SECONDS)
        assert not rig.broken
        rig.may_miss_losses = False
        await asyncio.sleep(REPORT_SECONDS + 0.3)
        assert not rig.broken
        if is_reported:
            rig.channels.disconnect((0,))
        await asyncio.sleep(0.5)
        assert len(rig.broken) == (not is_reported)
        rig.channels.close()

    async def both() -> None:
        await asyncio.gather(play(True), play(False))

    asyncio.run(both())


def test_what_is_sent_to_a_host_without_a_channel_waits_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def play() -> None:
        rig = Rig(monkeypatch)
        rig.dial = lambda path: refuse()
        assert list(await rig.connect(0)) == [0]
        rig.channels.upload([0], 7, [b"contents"])
        rig.dial = lambda path: rig.latest
        await rig.open()
        assert rig.latest.sent == [(7, [b"contents"])]
        rig.channels.close()

    asyncio.run(play())


def test_a_dial_that_ends_after_its_host_was_lost_opens_no_channel(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        lost = threading.Event()

        def late(path: str) -> FakeChannel:
            lost.wait(10)
            return rig.latest

        rig.dial = late
        connecting = asyncio.ensure_future(rig.connect(0))
        await asyncio.sleep(0.05)
        rig.channels.disconnect((0,))
        lost.set()
        await connecting
        assert rig.latest.is_closed
        await asyncio.sleep(REPORT_SECONDS + 0.1)
        assert not rig.broken  # of a channel to the host's former worker
        rig.channels.close()

    asyncio.run(play())


def test_a_host_is_dialled_until_it_is_reached(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        outcomes = [refuse, refuse, lambda: rig.latest]
        rig.dial = lambda path: outcomes.pop(0)()
        assert await rig.connect(0, patience=20.0) == {}
        rig.channels.upload([0], 7, [b"contents"])
        assert rig.latest.sent == [(7, [b"contents"])]
        rig.channels.close()

    asyncio.run(play())


def test_a_host_that_is_not_reached_within_the_patience_is_named(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        dials = []
        rig.dial = lambda path: dials.append(path) or refuse()
        assert list(await rig.connect(0, patience=0.3)) == [0]
        assert len(dials) > 1
        rig.channels.close()

    asyncio.run(play())


@pytest.mark.parametrize("end", [lambda channels: channels.disconnect((0,)), lambda channels: channels.close()])
def test_a_host_that_was_lost_meanwhile_is_dialled_no_more_and_not_unreached(monkeypatch: pytest.MonkeyPatch, end: Any):
    async def play() -> None:
        rig = Rig(monkeypatch)
        rig.dial = lambda path: refuse()
        connecting = asyncio.ensure_future(rig.connect(0, patience=60.0))
        await asyncio.sleep(0.05)
        end(rig.channels)
        assert await asyncio.wait_for(connecting, 10) == {}
        rig.channels.close()

    asyncio.run(play())


def test_calls_of_a_client_that_takes_none_are_answered(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        call = first_call(0) + 7
        rig.latest.calls = [first_call(0), call]  # a notice has no answer
        answered = rig.latest
        await rig.connect(0)
        async with asyncio.timeout(10):
            while not answered.sent:
                await asyncio.sleep(0.01)
        assert answered.sent == [(call, NO_CLIENT)]
        rig.channels.close()

    asyncio.run(play())


@pytest.mark.parametrize("lacks", ["", "is_local", "takes_reads", "has_space"])
def test_an_array_is_requested_from_a_host_that_takes_the_request_at_once(monkeypatch: pytest.MonkeyPatch, lacks: str):
    async def play() -> None:
        rig, wanted = Rig(monkeypatch), ReadWanted(5, 77)
        assert not rig.channels.read_directly(0, wanted), "the host has no channel"
        await rig.open()
        if lacks:
            setattr(rig.latest, lacks, False)
        assert rig.channels.read_directly(0, wanted) == (not lacks)
        assert rig.latest.sent == ([] if lacks else [(first_call(0), encode(wanted))])
        rig.channels.close()

    asyncio.run(play())


def test_a_file_that_waits_for_a_host_is_closed_with_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def play() -> None:
        rig = Rig(monkeypatch)
        (tmp_path / "file").write_bytes(b"contents")
        before = len(os.listdir("/proc/self/fd"))
        rig.channels.upload_file([0, 1], 7, 8, os.open(tmp_path / "file", os.O_RDONLY))
        assert len(os.listdir("/proc/self/fd")) == before + 2
        rig.channels.close()
        assert len(os.listdir("/proc/self/fd")) == before

    asyncio.run(play())


def refuse() -> FakeChannel:
    raise ConnectError("nobody there")
