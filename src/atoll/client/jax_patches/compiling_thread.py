"""Calls into the user's Python while XLA compiles on hosts.

In plain JAX, XLA calls Python on the compiling thread, which has the user's meshes and settings. So the client sends
the compile request on another thread, and the user's thread serves the calls until the request ends. Hosts that compile
the same program make the same calls, and the client computes the answer to each only once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.decodable import decodable
from atoll.errors import Code, StatusError
from atoll.protocol.callbacks import CompileAnswer, CompileCall

Decide = Callable[[CompileCall], CompileAnswer]
Array = np.ndarray[Any, Any]

_calls: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(decodable(CompileCall))


class _Outcome:
    """The result of a function that runs on another thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, function: Callable[[], Any]) -> None:
        try:
            self._result = function()
        except BaseException as error:
            self.fail(error)
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def get(self) -> Any:
        """Wait until the function has ended; return its result or raise its exception."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CompilingThread:
    """Runs a compilation on another thread, and its calls on the thread that requested it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], _Outcome] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False

    def compile(self, compile_: Callable[[], Any]) -> Any:
        """Run `compile_` on another thread; return its result or raise its exception. Use it once per instance."""
        outcome = _Outcome()

        def run() -> None:
            outcome.run(compile_)
            self._work.put(None)

        threading.Thread(target=run, name="atoll-compile", daemon=True).start()
        try:
            while (each := self._work.get()) is not None:
                each[1].run(each[0])
        finally:  # after a KeyboardInterrupt, the compilation continues without answers
            with self._lock:
                self._is_over = True
            while not self._work.empty():
                left = self._work.get()
                if left is not None:
                    left[1].fail(StatusError(Code.CANCELLED, "the compilation was interrupted"))
        return outcome.get()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the thread that waits in `compile`, or on this thread if that wait has ended."""
        outcome = _Outcome()
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._work.put((function, outcome))
        return function() if is_over else outcome.get()


def answering(thread: CompilingThread, decide: Decide) -> Callable[[Array], list[Array]]:
    """Return the callable for one custom call.

    It computes each answer once, for the first host that asks. Other hosts, and hosts that compile again after a
    restart, get the same answers.
    """
    answers: dict[bytes, _Outcome] = {}
    lock = threading.Lock()

    def answer(request: bytes) -> bytes:
        asked = _calls.decode(request)
        return msgspec.msgpack.encode(thread.call(lambda: decide(asked)))

    def callback(request: Array) -> list[Array]:
        asked = request.tobytes()
        with lock:
            is_first = asked not in answers
            outcome = answers.setdefault(asked, _Outcome())
        if is_first:
            outcome.run(lambda: answer(asked))
        return [np.frombuffer(outcome.get(), np.uint8)]

    return callback
