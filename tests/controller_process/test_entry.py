"""Tests of messages that enter the controller: tokens, names and texts are sanitized, and all other fields are
unchanged.
"""

from __future__ import annotations

import sys
import typing
from typing import Any

import msgspec
import pytest

from atoll.cluster.virtual_devices import DeviceInfo
from atoll.controller_process.entry import CLEANED, clean
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.protocol import messages as m
from atoll.protocol.messages.engine_messages import MachineReport
from atoll.security.tokens import digest

EVIL, SHOWN = "\x1b]0;owned\x07\x1b[2J\u202e", r"\x1b]0;owned\x07\x1b[2J\u202e"
ERROR = Status(13, f"{EVIL}\nline")
DEVICE = DeviceInfo(0, EVIL, EVIL, (EVIL,), EVIL, (0, 0, 0), 0, 0, 0, ((EVIL, EVIL), ("core_count", 132)))
MACHINE = MachineReport(EVIL, EVIL, EVIL, EVIL, {}, 0)


def strings(value: Any) -> str:
    """Return all texts of a message."""
    if isinstance(value, str):
        return value
    if isinstance(value, msgspec.Struct):
        return "".join(strings(getattr(value, each.name)) for each in msgspec.structs.fields(value))
    return "".join(map(strings, value)) if isinstance(value, tuple) else ""


@pytest.mark.parametrize(
    "message",
    [
        m.Hello(m.PROTOCOL, EVIL, "", 1, EVIL, EVIL, platform=EVIL),
        m.RegisterProgram(1, Program(EVIL, (), (), ())),
        m.MakeError((1,), ERROR),
        m.Compiled("name", ERROR, b"", 0.0, False, 0, False, EVIL),
        m.Failed(1, ERROR),
        m.WorkerReady(0, 0, (DEVICE,), EVIL, EVIL, "unix:/x", 1),
        m.SetTenant(EVIL),
        m.WorkerEnded(0, 1, 1, EVIL),
        m.LinkLost(0, EVIL),
        m.IslandStarts(0, 1, (EVIL,)),
        m.EngineReport(((0, EVIL),), (MACHINE,)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_terminal_would_obey_does_not_enter(message):
    before, after = strings(message), strings(clean(message))
    assert before.count(EVIL) == after.count(SHOWN) > 0
    assert after.replace("\n", "").isprintable()


def test_cleaning_many_devices_takes_few_calls():
    """Count calls, because durations depend on the machine. Listing the fields of a device takes 100 calls."""
    message = m.WorkerReady(0, 0, (DEVICE,) * 1000, "cpu", "1", "unix:/x", 1)
    clean(message)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        clean(message)
    finally:
        sys.setprofile(None)
    assert calls < 100 * len(message.devices)


def test_a_token_becomes_its_digest():
    hello = m.Hello(m.PROTOCOL, "proxy", "a token", 1, "0.1", "train.py")
    assert clean(hello) == msgspec.structs.replace(hello, token=digest("a token"))
    assert clean(clean(hello)).token != digest("a token"), "nobody gets in with a digest"
    assert clean(msgspec.structs.replace(hello, token="")).token == ""


def test_harmless_messages_are_the_same_objects():
    for message in (m.Failed(1, Status(13, "a\n\tb")), m.RegisterProgram(1, Program("step", (), (), ()))):
        assert clean(message) is message


def test_what_a_launch_sends_is_not_touched():
    assert CLEANED.keys().isdisjoint((m.Launch, m.Release, m.Await, m.Done, m.FeedsArrived, m.Pong, m.Enqueued))


def test_every_text_of_every_message_is_cleaned():
    for kind in typing.get_args(m.ToController):
        texts = {field.name for field in msgspec.structs.fields(kind) if field.type in (str, Status)}
        assert texts <= set(CLEANED.get(kind, ()))
