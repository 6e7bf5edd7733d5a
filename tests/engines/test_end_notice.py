"""Tests that peers of a cluster that has ended learn the reason."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest

from atoll.engines import end_notice
from atoll.engines.end_notice import JOIN_AFTER_END, serve_end_notice
from atoll.errors import AccessError
from atoll.protocol import messages as m
from atoll.security.enrollment import enroll
from atoll.security.join_token import JoinToken
from atoll.security.roles import Role
from atoll.wire.address import parse_address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect
from atoll.wire.resumption.link_messages import AnyLinkMessage, Resume, ResumeRefused
from tests.certificates import known_authority

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
        notice = asyncio.create_task(serve_end_notice(address, "", REASON, 600.0, 30.0))
        while not Path(address.path).exists():
            await asyncio.sleep(0.01)
        refused = await dialed(m.Hello(m.PROTOCOL, "operator", "", 7, "0.0"))
        assert isinstance(refused, m.Refused)
        assert refused.status.message == TEXT
        assert await dialed(Resume(1, "secret", 1, 0, 0, 1)) == ResumeRefused(TEXT, True, 600.0)
        notice.cancel()

    asyncio.run(scene())


def test_a_process_that_joins_learns_that_the_cluster_has_ended(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = parse_address(f"tls://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(end_notice, "load_certificate_authority", lambda directory: known_authority())
    join = JoinToken(address, known_authority().fingerprint, "a token")

    async def scene() -> None:
        notice = asyncio.create_task(serve_end_notice(address, "", REASON, seconds=60.0))
        while not is_served(address.port):
            await asyncio.sleep(0.01)
        with pytest.raises(AccessError, match=re.escape(JOIN_AFTER_END)) as refused:
            await asyncio.to_thread(enroll, join, Role.CLIENT, "train.py")
        assert REASON not in str(refused.value)  # the token may be wrong
        notice.cancel()

    asyncio.run(scene())


def is_served(port: int) -> bool:
    with socket.socket() as dialing:
        return dialing.connect_ex(("127.0.0.1", port)) == 0
