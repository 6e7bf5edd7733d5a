"""Generate hostile input for the controller's port from a seed: the bytes that one connection sends.

A conversation may begin like an honest one of its role. It continues with messages of any role: samples with exchanged
values, with truncated, extended or replaced bytes, frames of random bytes, pieces, and messages about the connection.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from atoll.ir.program import Call, HostBuffer, HostToDevice, Transfer
from atoll.protocol import messages as m
from atoll.wire.framing import encode, frame_header, link_header, piece_header
from atoll.wire.resumption.link_messages import (
    Acknowledge,
    AlternateAddresses,
    Close,
    Resume,
    Resumed,
    ResumeRefused,
    ResumeToken,
    encode_link,
)
from tests.controller.play import on, single
from tests.protocol.test_messages import sample_message

SAMPLES: list[Any] = [sample_message(kind) for kind in get_args(m.ToController) if kind is not m.Hello]
OF_PROXIES: list[Any] = [sample_message(kind) for kind in get_args(m.FromProxy)]
OF_OPERATORS: list[Any] = [sample_message(kind) for kind in get_args(m.FromOperator)]
# Messages that a user may send, and that would affect the measurement rather than the controller.
_LEFT_OUT = (m.StopRequest,)
# Messages of an honest client, which puts an array on a device and calls a function.
_SESSION = (
    m.RegisterFunction(1, "content", 7, ((0,),)),
    m.RegisterProgram(2, single("put", (), HostToDevice((HostBuffer(0, (2,), None, None),), (on(0),)), feeds=1)),
    m.RegisterProgram(1, single("f", (on(0),), Call(1, (0,), (on(0),), (0,)))),
    m.RegisterProgram(3, single("move", (on(0),), Transfer((0,), (on(1),)))),
    m.Launch(2, (), (10,), (5,)),
    m.Launch(2, (), (16,), (5,), wait=3),
    m.Launch(1, (10,), (11,), ()),
    m.Launch(3, (11,), (12,), ()),
    m.Await(1, (12,)),
    m.Release((10, 11)),
    m.ReleaseProgram(2),
    m.ReleaseFunction(1),
)
_NUMBERS = (0, 1, 2, 3, 7, 255, -1, -(1 << 31), 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_TEXTS = ("", "x", "ana", "ben", "default", "float32", "\0", "\x1b]0;x\x07", "../../etc/passwd", "x" * 300)


class ControlFuzzer:
    """Generates conversations of clients with one tenant's tokens. The same seed gives the same bytes."""

    def __init__(self, seed: int, token: str) -> None:
        self._random = random.Random(seed)
        self._token = token

    def conversation(self, longest: int = 40) -> list[bytes]:
        """Return the frames that one connection sends."""
        source = self._random
        kind = source.randrange(10)
        count = source.randint(1, longest)
        if kind < 2:
            return [self._hello("proxy"), *self._session()]
        if kind < 4:
            return [self._hello("proxy"), *self._messages(OF_PROXIES, count)]
        if kind < 6:
            return [self._hello("operator"), *self._messages(OF_OPERATORS, count)]
        if kind == 6:
            return [*self._messages(SAMPLES, 1), self._hello("proxy"), *self._messages(OF_PROXIES, 2)]
        if kind == 7:
            role = source.choice(("worker", "engine", "agent", "standby", "operator", "", "proxy"))
            return [self._hello(role), *self._messages(SAMPLES, count)]
        if kind == 8:
            return [self._hello("proxy"), self._hello("proxy"), *self._messages(SAMPLES, 2)]
        return [self._noise() for _ in range(source.randint(1, 3))]

    def _hello(self, role: str) -> bytes:
        source = self._random
        token = self._token if source.random() < 0.97 else source.choice(("", "a wrong token of some length", "\0"))
        protocol = m.PROTOCOL if source.random() < 0.99 else source.choice(_PROTOCOLS)
        hello = m.Hello(protocol, role, token, source.choice((1, 0, -1)), "fuzz", source.choice(_TEXTS))
        return encode(msgspec.structs.replace(hello, resumes=source.random() < 0.2))

    def _session(self) -> Iterator[bytes]:
        """Return an honest client's messages, some of which are replaced, repeated or omitted."""
        source = self._random
        exchanged = source.random() * 0.5
        for message in _SESSION:
            kind = source.random()
            if kind > 0.1:
                yield self._encoded(message, source.randint(1, 3) if source.random() < exchanged else 0)
            if kind > 0.9:
                yield self._encoded(source.choice(_SESSION), 0)

    def _messages(self, samples: list[Any], count: int) -> Iterator[bytes]:
        for _ in range(count):
            kind = self._random.random()
            if kind < 0.9:
                yield self._message(samples if kind < 0.8 else SAMPLES)
            elif kind < 0.96:
                yield self._broken(self._message(samples))
            else:
                yield self._noise()

    def _message(self, samples: list[Any]) -> bytes:
        message = self._random.choice(samples)
        while isinstance(message, _LEFT_OUT):
            message = self._random.choice(samples)
        return self._encoded(message, self._random.choice((0, 0, 1, 1, 2, 4)))

    def _encoded(self, message: Any, changes: int) -> bytes:
        content = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        for _ in range(changes):
            fields = self._exchanged(content[1:])
            content[1:] = fields if isinstance(fields, list) else [fields]
        try:
            body = msgspec.msgpack.encode(content)
        except (OverflowError, ValueError):
            body = msgspec.msgpack.encode(message)
        return frame_header(len(body)) + body

    def _exchanged(self, value: Any, depth: int = 0) -> Any:
        """Return a value in which a part was usually replaced by another value of the same type."""
        source = self._random
        if isinstance(value, list) and value and depth < 8:
            place = source.randrange(len(value))
            kind = source.random()
            if kind < 0.8:
                return [self._exchanged(each, depth + 1) if here == place else each for here, each in enumerate(value)]
            if kind < 0.9:
                return value[:place] if depth else value
            return value * source.choice((2, 3)) if depth else value
        if isinstance(value, dict) and value:
            return {key: self._exchanged(each, depth + 1) for key, each in value.items()}
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return source.choice((*_NUMBERS, value + 1, value - 1, source.getrandbits(62)))
        if isinstance(value, float):
            return source.choice((0.0, -1.0, 1e308, float("inf"), float("nan"), source.random()))
        if isinstance(value, str):
            return source.choice(_TEXTS)
        if isinstance(value, bytes):
            return source.choice((b"", b"x", value[:-1], source.randbytes(40)))
        return source.choice((None, 0, "", [], {}, b"", True))

    def _broken(self, frame: bytes) -> bytes:
        """Return a frame whose contents are truncated, extended, or have other bytes."""
        body, source = bytearray(frame[4:]), self._random
        match source.randrange(3):
            case 0:
                body = body[: source.randrange(len(body) + 1)]
            case 1:
                body += source.randbytes(source.randint(1, 20))
            case 2:
                for _ in range(source.randint(1, 4)):
                    body[source.randrange(len(body))] = source.randrange(256)
        return frame_header(len(body)) + body

    def _noise(self) -> bytes:
        source = self._random
        match source.randrange(6):
            case 0:
                return source.randbytes(source.randint(1, 60))
            case 1:
                body = source.randbytes(source.randint(0, 200))
                return frame_header(len(body)) + body
            case 2:
                body = source.randbytes(source.randint(0, 100))
                return piece_header(len(body), source.random() < 0.5) + body
            case 3:
                body = source.randbytes(source.randint(0, 40))
                return link_header(len(body)) + body
            case 4:
                return frame_header(source.choice((1 << 14, 1 << 20, 63 << 20, (1 << 32) - 1))) + source.randbytes(30)
        return encode_link(self._word())

    def _word(self) -> Any:
        source = self._random
        number, count = source.choice(_NUMBERS[:9]), source.choice((0, 1, 1 << 40))
        secret = source.choice(("", "x" * 64, source.randbytes(32).hex()))
        return source.choice(
            (
                Resume(number, secret, source.randint(0, 5), count, count, source.randint(0, 3)),
                Acknowledge(count, count),
                ResumeToken(number, secret, 1, 1.0),
                Resumed(1, count, count),
                ResumeRefused("x", source.random() < 0.5),
                AlternateAddresses(("unix:/nowhere",)),
                Close(),
            )
        )


_PROTOCOLS = (0, -1, 1 << 40)
