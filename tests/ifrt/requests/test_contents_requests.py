"""Tests of arrays whose contents the client's process sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.errors import Code, StatusError
from atoll.executables.program_executables import SmallWritingExecutable, WritingExecutable
from atoll.ifrt.requests.contents_requests import put_small_contents, write_contents
from atoll.ir.program import HostBuffer, HostToDevice
from atoll.ir.types import REPLICATED, ArraySpec, Replicated, Sharding, Tiled
from atoll.protocol.submission import PutArray, SmallWriting, Writing, first_feed
from tests.ifrt.rig import Rig, node_of


def test_a_write_is_refused_while_the_client_cannot_be_asked_for_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    relay = SimpleNamespace(has_client=False, writes=SimpleNamespace(start=lambda *write: asked.append(write)))
    monkeypatch.setattr(rig.session, "client_relay", lambda: relay)
    executable = WritingExecutable(Writing((0,), 0, PutArray("float32", (4,)), REPLICATED), rig.session.cluster)
    with pytest.raises(StatusError, match="UNAVAILABLE: the connection on which the client sends contents"):
        write_contents(rig.session, executable, [7], 0)
    assert (rig.take(), asked) == ([], [])
    relay.has_client = True
    write_contents(rig.session, executable, [8], 0)
    _, launch = rig.take_launch()
    assert asked == [(first_feed(0) + 1, launch.feeds[0], [0], 16)], "the client has counted the refused run"


@pytest.mark.parametrize("tiling", [REPLICATED, Tiled((2,), (1, 0))])
@pytest.mark.parametrize("carries", [False, True])
def test_small_contents_are_taken_from_the_slot_of_each_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, carries: bool, tiling: Replicated | Tiled
) -> None:
    welcome = msgspec.structs.replace(rig.cluster.session.welcome, most_carried=16 if carries else 0)
    rig.cluster.session.welcome = welcome
    slots = {first_feed(3) + 1: b"0123456789abcdef"}

    def take_small(write: int, nbytes: int) -> bytes:
        if write not in slots:
            raise StatusError(Code.INVALID_ARGUMENT, "no contents")
        return slots.pop(write)[:nbytes]

    monkeypatch.setattr(rig.session, "client_relay", lambda: SimpleNamespace(take_small=take_small))
    executable = SmallWritingExecutable(SmallWriting((0, 2), 3, PutArray("float32", (4,)), tiling), rig.session.cluster)
    with pytest.raises(StatusError, match="no contents"):
        put_small_contents(rig.session, executable, [7], 0)
    put_small_contents(rig.session, executable, [8], 0)
    program, launch = rig.take_launch()
    made = ArraySpec("float32", (4,), Sharding((0, 2), tiling))
    assert node_of(program) == HostToDevice((HostBuffer(0, (4,), None, None),), (made,))
    assert launch.contents == (b"0123456789abcdef" if carries else None)
    assert [(hosts, contents) for hosts, _, contents in rig.cluster.uploads] == (
        [] if carries else [((0, 1), b"0123456789abcdef")]
    )
    assert rig.session.arrays.spec(8) == made


def test_large_contents_have_no_slot(rig: Rig) -> None:
    writing = SmallWriting((0,), 0, PutArray("float32", (16385,)), REPLICATED)
    with pytest.raises(StatusError, match="small contents have at most 65536 bytes, and these 65540"):
        SmallWritingExecutable(writing, rig.session.cluster)


@pytest.mark.parametrize(
    "tiling", [Tiled((3,), (0, 1)), Tiled((2,), (0, 0)), Tiled((2,), (0, 9)), Tiled((), (0, 1)), Tiled((1,) * 99, (0,))]
)
def test_tiles_that_do_not_fit_are_refused(rig: Rig, tiling: Tiled) -> None:
    with pytest.raises(StatusError, match="INVALID_ARGUMENT"):
        SmallWritingExecutable(SmallWriting((0, 2), 0, PutArray("float32", (4,)), tiling), rig.session.cluster)
