"""Unary methods of the proxy's service: one message in, one out, or a status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.errors import status_of
from atoll.grpc import Call
from atoll.protocol.translation import codec


def unary(kind: Any, handle: Callable[[Any], Any]) -> Callable[[Call], None]:
    """A method that takes messages of `kind`; `handle` returns the reply, or raises."""

    def method(call: Call) -> None:
        def on_message(data: bytes | memoryview) -> None:
            try:
                reply = handle(codec.parse(kind, bytes(data)))
            except Exception as error:
                status = status_of(error)
                call.finish(status.code, status.message)
                return
            call.send(reply.SerializeToString())
            call.finish()

        call.on_message = on_message

    return method
