"""One cluster, asked again and again over one connection, with one identity: the `Source` of whoever shows it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from atoll.operate.cluster_queries import Target, add_island, explained, operate
from atoll.operate.operator_requests import Operation, OperatorConnection
from atoll.protocol import messages as m
from atoll.protocol.spans import Span, TraceRecord

_decode = msgspec.msgpack.Decoder(TraceRecord).decode


class ClusterSource:
    """As `telemetry.watch.Source`. Opens its connection when it is first asked, and again where it was lost."""

    def __init__(self, target: Target, token: str) -> None:
        self._target = target
        self._token = token
        self._connection: OperatorConnection | None = None
        self._opening = asyncio.Lock()

    @property
    def name(self) -> str:
        return self._target.record.title if self._target.record else str(self._target.address)

    async def report(self) -> bytes:
        reply = await self._ask(m.StatusRequest())
        assert isinstance(reply, m.StatusReply)
        return reply.content

    async def spans(self, position: int, most: int) -> tuple[list[Span], int]:
        reply = await self._ask(m.TraceRequest(after=position, most=most))
        assert isinstance(reply, m.TraceReply)
        return _decode(reply.content).spans, reply.position

    async def _ask(self, request: m.Message) -> Any:
        async with self._opening:
            connection = self._connection
            if connection is None or connection.is_lost:
                self.close()
                with explained():
                    connection = await OperatorConnection.open(self._target.address, self._token, self._target.join)
                self._connection = connection
        return await connection.ask(request)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ---- operations: each on a connection of its own, since it may take minutes

    async def drain(self, island: int) -> str:
        return await self._operate(m.DrainRequest(island))

    async def add_island(self, like: int) -> str:
        return await asyncio.to_thread(add_island, self._target, self._token, m.AddIslandRequest(like=like))

    async def end_session(self, session: int) -> str:
        return await self._operate(m.EndSessionRequest(session))

    async def set_share(self, tenant: str, share: float) -> str:
        return await self._operate(m.SetTenant(tenant, share=share))

    async def _operate(self, operation: Operation) -> str:
        return await asyncio.to_thread(operate, self._target, self._token, operation)
