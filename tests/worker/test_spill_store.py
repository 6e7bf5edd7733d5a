"""Tests of arrays spilled to a host's memory, except if that would leave too little for others."""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.errors import Code
from atoll.protocol import messages as m
from atoll.worker import spill_files
from atoll.worker import spill_store as module
from atoll.worker.spill_store import SpillStore

SHARDS = [np.full(1000, number, np.uint8) for number in range(3)]


class Pool:
    """Does at once what it is given."""

    def submit(self, call: Any, *arguments: Any) -> Future[None]:
        call(*arguments)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def put(
    room: int, to_files: bool = False, directory: str = "", are_dropped_together: bool = False
) -> tuple[SpillStore, m.SpillReply]:
    """Spill three shards on a host with memory for this many bytes. Return the reply."""
    replies: list[Any] = []
    backend: Any = SimpleNamespace(shards=lambda buffer: SHARDS)
    readers: Any = SimpleNamespace(hold=lambda buffer, count: lambda: None)
    store: Any = SimpleNamespace(get=lambda handle: object())
    pool: Any = Pool()
    nobody: Any = None
    spill_store = SpillStore(
        backend,
        nobody,
        nobody,
        3,
        readers,
        replies.append,
        pool,
        lambda nbytes: spill_store.nbytes + nbytes <= room,
    )
    shards = ((1, 5, 0), (2, 5, 1), (3, 5, 2))
    request = m.SpillRequest(1, 7, shards, to_files, directory, are_dropped_together=are_dropped_together)
    spill_store.spill(request, store)
    (answer,) = replies
    return spill_store, answer


@pytest.fixture(autouse=True)
def any_array_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "live_array", lambda buffer: buffer)


def test_an_array_that_fits_is_spilled():
    spill_store, answer = put(room=3000)
    assert (answer.status.ok, [each.nbytes for each in answer.pieces], spill_store.nbytes) == (True, [1000] * 3, 3000)


def test_a_host_with_too_little_memory_says_so_and_keeps_nothing():
    spill_store, answer = put(room=2500)
    assert (answer.status.code, answer.pieces, spill_store.nbytes) == (Code.RESOURCE_EXHAUSTED, (), 0)
    assert "host 3 has too little memory left to spill 1000 B more" in answer.status.message
    assert "--to disk" in answer.status.message


def test_files_need_none(tmp_path):
    _, answer = put(room=0, to_files=True, directory=str(tmp_path / "session"))
    assert answer.status.ok
    assert len({each.path for each in answer.pieces}) == 3


def test_small_pieces_that_are_dropped_together_share_a_file(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(spill_files, "MAX_SHARED_BYTES", 999)
        spill_store, answer = put(0, True, str(tmp_path / "large"), are_dropped_together=True)
    assert len({each.path for each in answer.pieces}) == 3
    spill_store, answer = put(0, True, str(tmp_path / "small"), are_dropped_together=True)
    assert [each.offset for each in answer.pieces] == [0, 1000, 2000]
    assert [each.name for each in (tmp_path / "small").iterdir()] == ["1.piece"]
    spill_store.drop(m.DropSpilled(1, answer.pieces[:1]))
    assert not (tmp_path / "small").exists()


def test_a_full_disk_leaves_no_file_and_no_directory(tmp_path, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("pwrite", "fdatasync"):
        with monkeypatch.context() as context:
            context.setattr(os, name, full)
            _, answer = put(0, True, str(tmp_path / "session"), are_dropped_together=True)
        assert (answer.status.code, answer.pieces) == (Code.INTERNAL, ())
        assert "1.piece: No space left on device" in answer.status.message
        assert not (tmp_path / "session").exists()
