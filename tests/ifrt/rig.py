"""An IFRT session without processes. Tests send requests, and read responses and the messages to the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from atoll.errors import OK, Status
from atoll.ifrt.ifrt_session import FIRST_MINTED_HANDLE, IfrtSession
from atoll.ifrt.requests import handle_request
from atoll.ir.program import Node, Program
from atoll.ir.types import ArraySpec, Even, Replicated, Sharding
from atoll.protocol import messages as m
from atoll.protocol.ifrt import session_pb2, values_pb2
from atoll.protocol.translation.codec import dtype_to
from atoll.protocol.translation.shardings import sharding_to
from tests.session.fake_cluster import FakeCluster

MINTED = FIRST_MINTED_HANDLE
# A Python stack of the client.
STACK = 77


class Rig:
    """Session with its stream. `paused` is true while the client's requests are held back."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.cluster = FakeCluster(first_handle=MINTED)
        self.responses: list[Any] = []
        self.paused = True
        self._op = 0
        self.session: IfrtSession
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        self.session = IfrtSession(self.cluster.session, 9, self._write, self._pause, self._resume)
        self.session.start()

    def close(self) -> None:
        self.session.close()
        self.settle()
        self.loop.close()

    def _write(self, data: bytes) -> None:
        self.responses.append(session_pb2.Response.FromString(data))

    def _pause(self) -> None:
        assert not self.paused
        self.paused = True

    def _resume(self) -> None:
        assert self.paused
        self.paused = False

    def settle(self) -> None:
        """Run all callbacks that are due."""
        self.loop.run_until_complete(asyncio.sleep(0.001))

    # ---- the client

    def send(self, kind: str, message: Any = None, *, stack: int = STACK, **fields: Any) -> int:
        """Send a request, and return its number."""
        self._op += 1
        request = session_pb2.Request()
        request.meta.op_id = self._op
        request.meta.user_context_id = stack
        part = getattr(request, kind)
        part.SetInParent()
        if message is not None:
            part.CopyFrom(message)
        for name, value in fields.items():
            part.MergeFrom(type(part)(**{name: value}))

        async def handle() -> None:
            handle_request(self.session, request.SerializeToString())
            await asyncio.sleep(0.001)

        self.loop.run_until_complete(handle())
        return self._op

    def answer(self, op: int) -> Any | None:
        """Return the response to a request, or None."""
        found = [response for response in self.responses if response.meta.op_id == op]
        assert len(found) <= 1, "a request is answered once"
        return found[0] if found else None

    def ask(self, kind: str, message: Any = None, **fields: Any) -> Any:
        """Send a request that is answered at once, and return the response."""
        response = self.answer(self.send(kind, message, **fields))
        assert response is not None, f"{kind} is not answered"
        return response

    def make(self, handle: int, spec: ArraySpec, stack: int = 0) -> int:
        """Make an array of the session with this handle."""
        self.session.define([handle], [spec], stack)
        return handle

    # ---- the controller

    def take(self) -> list[Any]:
        """Return the messages to the controller since the last call."""
        return self.cluster.take()

    def take_launch(self) -> tuple[Program, m.Launch]:
        """Return the program that was registered and launched, after checking that there are no other messages."""
        registered, launch = self.take()
        number, program = program_of(registered)
        assert launch.program == number
        return program, launch

    def receive(self, message: Any) -> None:
        self.loop.call_soon(self.cluster.session.handle, message)
        self.settle()

    def end_waits(self, sent: Sequence[Any], status: Status = OK) -> None:
        """Answer those of the messages that wait for handles."""
        for message in sent:
            if isinstance(message, m.Await) or (isinstance(message, m.Launch) and message.wait):
                self.receive(m.Awaited(message.wait, status))


def program_of(message: Any) -> tuple[int, Program]:
    match message:
        case m.RegisterProgram(number, program):
            return number, program
    raise AssertionError(f"{message} registers no program")


def check_refused(response: Any, code: int, text: str) -> None:
    """Check that the response is a failure outside of the sequence."""
    assert response.WhichOneof("kind") is None
    assert (response.meta.status.code, response.meta.destroyed_user_context_ids) == (code, [])
    assert text in response.meta.status.message, response.meta.status.message


def on(*devices: int, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> ArraySpec:
    """Return the type of an array that is divided along its first dimension between these devices."""
    if len(devices) == 1:
        return ArraySpec(dtype, shape, Sharding(devices, Replicated()))
    return ArraySpec(dtype, shape, Sharding(devices, Even((shape[0] // len(devices), *shape[1:]))))


def spec_proto(spec: ArraySpec) -> Any:
    return values_pb2.ArraySpec(
        dtype=dtype_to(spec.dtype), shape={"dims": spec.shape}, sharding=sharding_to(spec.sharding, spec.shape, None)
    )


def node_of(program: Program) -> Node:
    (node,) = program.nodes
    return node


@pytest.fixture
def rig() -> Any:
    rig = Rig()
    yield rig
    rig.close()
