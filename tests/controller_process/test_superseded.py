"""A controller that learns that another one has taken over."""

from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.controller_process.journal_recovery import JournalRecovery
from atoll.wire.address import Address
from tests.controller_process.test_resumption import Peer, Process


def test_a_controller_that_learns_of_a_later_term_ends_and_writes_nothing_any_more(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "socket"))

    async def main() -> None:
        process = Process(address)
        shell = process.shell
        del shell.controller.handle  # type: ignore[attr-defined]
        JournalRecovery(str(tmp_path / "journal"), restarts=False).hand_over(shell)
        await process.listen()
        peer = await Peer.open(address, "worker")
        while not peer.connection.can_resume:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        peer.connection._term = 8  # type: ignore[union-attr]
        peer.connection.drop("the test")  # type: ignore[union-attr]
        await asyncio.wait_for(shell._stop.wait(), 10)
        assert shell.superseded_by == 8
        segment = tmp_path / "journal" / "00000001.events"
        size = segment.stat().st_size
        late = await Peer.open(address, "proxy")
        while not late.lost:
            await asyncio.sleep(0.01)
        shell.stop()
        await asyncio.sleep(0.05)
        assert segment.stat().st_size == size
        process.server.close()
        peer.connection.close()

    asyncio.run(asyncio.wait_for(main(), 30))
