"""Handlers of all kinds for tests, and their calls by the gRPC library's client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from atoll.grpc import Call, GrpcError, StatusCode
from tests.grpc.http2.http2_peer import DEADLINE_SECONDS
from tests.grpc.serving import echo

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
MAX_MESSAGE = 100 << 20


class Service:
    """Handlers, with a record of their calls."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.calls: list[Call] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def keep(self, call: Call) -> None:
        self.closed.clear()
        self.calls.append(call)
        call.set_handlers(on_closed=self.closed.set)
        call.send_initial_metadata({"state": b"kept"})

    def count(self, call: Call) -> None:
        """Reply with the number and the sum of the sizes of the messages."""
        sizes: list[int] = []
        call.set_handlers(
            lambda content: sizes.append(len(content)),
            lambda: (call.send(b"%d %d" % (len(sizes), sum(sizes))), call.finish())[1],
        )

    def pieces(self, call: Call) -> None:
        """Reply with a message made of pieces. The request contains their number and size."""

        def answer(content: Any) -> None:
            count, size = map(int, bytes(content).split())
            call.send([memoryview(bytes([number % 256]) * size) for number in range(count)])
            call.finish()

        call.set_handlers(answer)

    def stream(self, call: Call) -> None:
        """Send 64 messages of 1 MiB, buffering at most the low-water mark plus one message."""

        async def send() -> None:
            content = memoryview(bytes(1 << 20))
            for _ in range(64):
                call.send(content)
                assert call.unsent_bytes <= (1 << 20) + (256 << 10) + 10
                await call.drained()
            call.finish()

        task = asyncio.get_running_loop().create_task(send())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def slow(self, call: Call) -> None:
        """Read one message per iteration of the loop, and echo it."""
        loop = asyncio.get_running_loop()

        def take(content: Any) -> None:
            call.send(bytes(content))
            call.pause()
            loop.call_soon(call.resume)

        call.set_handlers(take, call.finish)

    def metadata(self, call: Call) -> None:
        call.send_initial_metadata({"text": call.metadata["text"], "raw-bin": call.metadata["raw-bin"]})
        call.finish()

    def status(self, call: Call) -> None:
        call.set_handlers(lambda content: call.finish(StatusCode.NOT_FOUND, bytes(content).decode()))

    def raises(self, call: Call) -> None:
        raise RuntimeError("handler broke")

    def raises_later(self, call: Call) -> None:
        def on_message(content: Any) -> None:
            raise RuntimeError("callback broke")

        self.closed.clear()
        call.set_handlers(on_message, on_closed=self.closed.set)

    def raises_status(self, call: Call) -> None:
        raise GrpcError(StatusCode.FAILED_PRECONDITION, "not today")

    def methods(self) -> dict[str, Callable[[Call], None]]:
        names = (
            "keep",
            "count",
            "pieces",
            "stream",
            "slow",
            "metadata",
            "status",
            "raises",
            "raises_later",
            "raises_status",
        )
        return {"/test.Test/Echo": echo} | {f"/test.Test/{name}": getattr(self, name) for name in names}


def unary(channel: grpc.Channel, method: str, content: bytes = b"", **options: Any) -> Any:
    return channel.unary_unary(f"/test.Test/{method}")(content, timeout=DEADLINE_SECONDS, **options)


def error_of(channel: grpc.Channel, method: str, content: bytes = b"", **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        unary(channel, method, content, **options)
    return caught.value
