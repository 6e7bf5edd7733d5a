"""Tests that peers of a cluster that has ended learn the reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.engines.end_notice import serve_end_notice
from atoll.protocol import messages as m
from atoll.wire.address import parse_address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from atoll.wire.resumption.link_messages import AnyLinkMessage, Resume, ResumeRefused

REASON = "the controller cannot run: no journal"
TEXT = f"the cluster has ended: {REASON}"


def test_a_new_peer_and_one_that_resumes_get_the_reason(short_directory: Path):
    address = parse_address(f"unix:{short_directory}/c")

    async def dialed(first: m.Hello | Resume) -> object:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def answered(message: object) -> None:
            answer.set_result(message)

        def on_link(message: AnyLinkMessage) -> None:
            answered(message)

        connection: Connection = await connect(
            address, m.Refused, answered, lambda reason: None, name="the controller", on_link=on_link
        )
        if isinstance(first, Resume):
            connection.send_link(first)
        else:
            connection.send(first)
        return await asyncio.wait_for(answer, 10.0)

    async def scene() -> None:
        notice = asyncio.create_task(serve_end_notice(address, "", REASON, 30.0))
        while not Path(address.path).exists():
            await asyncio.sleep(0.01)
        refused = await dialed(m.Hello(m.PROTOCOL, "operator", "", 7, "0.0"))
        assert isinstance(refused, m.Refused)
        assert refused.status.message == TEXT
        assert await dialed(Resume(1, "secret", 1, 0, 0, 1)) == ResumeRefused(TEXT, True)
        notice.cancel()

    asyncio.run(scene())
