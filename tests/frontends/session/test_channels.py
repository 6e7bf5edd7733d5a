"""A session's data channels, when hosts go and come back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from atoll.errors import Status
from atoll.frontends.session import channels
from atoll.frontends.session.channels import Channels
from atoll.wire.address import Address

NEWS_SECONDS = 0.3
NOWHERE = Address(path="/nowhere")


class FakeChannel:
    """Receives nothing until it breaks, or is closed."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def receive(self, on_piece: Any) -> None:
        self._over.wait(20)

    def close(self) -> None:
        self._over.set()


class Rig:
    """Channels to host 0, and what was told of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channels, "_NEWS_SECONDS", NEWS_SECONDS)
        monkeypatch.setattr(channels, "_open", lambda *_: self.latest)
        self.broken: list[Status] = []
        self.channels = Channels(asyncio.get_running_loop(), lambda *_: None, self.broken.append)

    async def open(self) -> None:
        self.latest = FakeChannel()
        await self.channels.open(0, NOWHERE, 1, "secret")

    async def break_it(self) -> None:
        self.latest.close()
        await asyncio.sleep(0.05)


def test_a_channel_that_breaks_alone_is_told(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        await rig.open()
        await rig.break_it()
        assert not rig.broken
        await asyncio.sleep(NEWS_SECONDS)
        assert len(rig.broken) == 1
        rig.channels.close()

    asyncio.run(play())


def test_a_host_that_is_lost_again_as_soon_as_it_is_back_ends_no_session(monkeypatch: pytest.MonkeyPatch):
    async def play() -> None:
        rig = Rig(monkeypatch)
        await rig.open()
        await rig.break_it()
        rig.channels.lose((0,))
        await rig.open()
        await asyncio.sleep(NEWS_SECONDS - 0.1)
        await rig.break_it()  # of which the controller has yet to tell, when the time of the first break is over
        await asyncio.sleep(0.1)
        rig.channels.lose((0,))
        await asyncio.sleep(NEWS_SECONDS)
        assert not rig.broken
        rig.channels.close()

    asyncio.run(play())
