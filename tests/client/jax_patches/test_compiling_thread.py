"""Tests of hosts' questions during compilation: the compiling thread answers each question once."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.client.jax_patches.compiling_thread import CompilingThread, answering
from atoll.errors import StatusError
from atoll.protocol.callbacks import CompileAnswer, CompileCall, Inspect

SECONDS = 10.0


def request(occurrence: int = 1) -> np.ndarray[Any, Any]:
    return np.frombuffer(msgspec.msgpack.encode(Inspect(b"sharding", occurrence)), np.uint8)


def test_calls_run_on_the_thread_that_compiles_while_it_compiles_and_on_the_callers_after_that() -> None:
    thread = CompilingThread()
    ran: list[str] = []

    def compile_() -> int:
        thread.call(lambda: ran.append(threading.current_thread().name))
        return 7

    assert thread.compile(compile_) == 7
    other = threading.Thread(
        target=lambda: thread.call(lambda: ran.append(threading.current_thread().name)), name="other"
    )
    other.start()
    other.join(SECONDS)
    assert ran == [threading.current_thread().name, "other"]


def test_a_compilation_raises_what_it_raised() -> None:
    def compile_() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        CompilingThread().compile(compile_)


def test_what_is_asked_of_a_compilation_that_was_interrupted_is_cancelled() -> None:
    thread = CompilingThread()
    failed = threading.Event()

    def interrupt() -> None:
        raised = threading.Thread(target=ask)
        raised.start()
        while not thread._work.qsize():
            pass
        raise KeyboardInterrupt

    def ask() -> None:
        try:
            thread.call(lambda: None)
        except StatusError:
            failed.set()

    thread._work.put((interrupt, _Interrupting()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        thread.compile(lambda: failed.wait(SECONDS))
    assert failed.wait(SECONDS)


class _Interrupting:
    """Outcome whose function interrupts the thread that runs it."""

    def run(self, function: Any) -> None:
        function()


def test_hosts_that_ask_the_same_have_one_answer_and_each_occurrence_has_its_own() -> None:
    asked: list[CompileCall] = []

    def decide(call: CompileCall) -> CompileAnswer:
        asked.append(call)
        return CompileAnswer(b"%d" % len(asked))

    thread = CompilingThread()
    callback = answering(thread, decide)
    thread.compile(lambda: None)

    def answer(occurrence: int) -> bytes | None:
        (content,) = callback(request(occurrence))
        return msgspec.msgpack.decode(content.tobytes(), type=CompileAnswer).result

    assert [answer(1), answer(1), answer(2), answer(1)] == [b"1", b"1", b"2", b"1"]
    assert len(asked) == 2


def test_hosts_that_ask_the_same_have_one_error_without_our_frames() -> None:
    calls: list[CompileCall] = []

    def decide(call: CompileCall) -> CompileAnswer:
        calls.append(call)
        raise ValueError("no sharding today")

    thread = CompilingThread()
    callback = answering(thread, decide)
    thread.compile(lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="no sharding today"):
            callback(request())
    assert len(calls) == 1
