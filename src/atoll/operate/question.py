"""An operator's question to a controller, and its answer."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import msgspec

from atoll._version import __version__
from atoll.controller.operators.trace import Span
from atoll.errors import ConnectError, refusal
from atoll.protocol import messages as m
from atoll.wire.address import Address
from atoll.wire.connection import connect

ANSWER_SECONDS = 10.0
# Longer than the controller tries.
MOVE_SECONDS = 900.0


def ask_for_report(address: Address, token: str) -> bytes:
    """What the cluster at `address` has and does, as JSON. Raises ConnectError and its kin."""
    answer = asyncio.run(_ask(address, token, m.StatusRequest()))
    assert isinstance(answer, m.StatusReply)
    return answer.content


def ask_for_dump(address: Address, token: str) -> bytes:
    """The event log of the controller at `address`; see `atoll.controller.log`. Raises ConnectError and its kin."""
    answer = asyncio.run(_ask(address, token, m.DumpRequest()))
    assert isinstance(answer, m.DumpReply)
    return answer.content


def ask_for_trace(address: Address, token: str, since: int = 0) -> list[Span]:
    """What ran on the cluster's hosts and ended after `since`. Raises ConnectError and its kin."""
    answer = asyncio.run(_ask(address, token, m.TraceRequest(since)))
    assert isinstance(answer, m.TraceReply)
    return msgspec.msgpack.decode(answer.content, type=list[Span])


def ask_to_stop(address: Address, token: str) -> None:
    """Returns once the controller has agreed to end its cluster. Raises ConnectError and its kin."""
    asyncio.run(_ask(address, token, m.StopRequest()))


def ask_to_change(address: Address, token: str, question: m.RemapRequest | m.AddIslandRequest | m.DrainRequest) -> str:
    """Returns once that is done, with a sentence. Raises StatusError, and ConnectError and its kin."""
    told = asyncio.run(_ask(address, token, question, MOVE_SECONDS))
    assert isinstance(told, m.OperationReply)
    told.status.raise_if_error()
    return told.text


async def _ask(address: Address, token: str, question: m.Message, seconds: float = ANSWER_SECONDS) -> Any:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def on_message(message: Any) -> None:
        if answer.done():
            return
        if isinstance(message, m.Refused):
            answer.set_exception(refusal(message.status, f"the cluster at {address} refuses us: "))
        else:
            answer.set_result(message)

    def on_lost(reason: str) -> None:
        if not answer.done():
            answer.set_exception(ConnectError(f"no answer from {address}: {reason}"))

    connection = await connect(address, m.ToOperator, on_message, on_lost, name="the Atoll controller")
    connection.send(m.Hello(m.PROTOCOL, "operator", token, os.getpid(), __version__, "atoll"))
    connection.send(question)
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise ConnectError(f"the controller at {address} did not answer within {seconds:.0f} s") from None
    finally:
        connection.close()
