"""The user's Python that hosts call while XLA compiles there: how often, and on which thread of the client.

In one process XLA calls it on the thread that compiles, which has the user's meshes and settings. So the compile
request goes to a thread of its own, and the user's thread serves the calls until that has ended. Hosts that compile the
same program ask the same: each question is answered once.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.errors import Code, StatusError, invalid
from atoll.protocol.compile_calls import CompileAnswer, CompileCall

Decide = Callable[[CompileCall], CompileAnswer]
Array = np.ndarray[Any, Any]

_calls: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(CompileCall)
_answers: msgspec.msgpack.Decoder[CompileAnswer] = msgspec.msgpack.Decoder(CompileAnswer)


# ---- on a host


class Questions:
    """What one compilation asks; `ask` takes the key of a custom call and bytes, and returns the answer's bytes."""

    def __init__(self, ask: Callable[[bytes, bytes], bytes]) -> None:
        self._ask = ask
        self._asked: Counter[bytes] = Counter()

    def ask(self, key: bytes, call: CompileCall) -> CompileAnswer:
        """Blocks. Raises what `ask` raises, and INVALID_ARGUMENT for an answer that is none."""
        digest = hashlib.sha256(key + msgspec.msgpack.encode(call)).digest()
        self._asked[digest] += 1
        numbered = msgspec.structs.replace(call, occurrence=self._asked[digest])
        try:
            return _answers.decode(self._ask(key, msgspec.msgpack.encode(numbered)))
        except msgspec.MsgspecError as error:
            raise invalid(f"the answer of a callback of a compilation cannot be read: {error}") from None


# ---- in the client


class _Outcome:
    """Of a function that runs on another thread."""

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
        """Blocks until it has run; returns what it returned, or raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class CompilingThread:
    """Runs a compilation beside the thread that wants it, and on this thread what the compilation calls."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], _Outcome] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_over = False

    def compile(self, compile_: Callable[[], Any]) -> Any:
        """What `compile_` returns or raises, on another thread. For the thread that wants it, once."""
        outcome = _Outcome()

        def run() -> None:
            outcome.run(compile_)
            self._work.put(None)

        threading.Thread(target=run, name="atoll-compile", daemon=True).start()
        try:
            while (each := self._work.get()) is not None:
                each[1].run(each[0])
        finally:  # KeyboardInterrupt, maybe: the compilation goes on, and gets no answers
            with self._lock:
                self._is_over = True
            while not self._work.empty():
                left = self._work.get()
                if left is not None:
                    left[1].fail(StatusError(Code.CANCELLED, "its compilation was given up"))
        return outcome.get()

    def call(self, function: Callable[[], Any]) -> Any:
        """What `function` returns or raises on the compiling thread; on this one, once that has gone on."""
        outcome = _Outcome()
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._work.put((function, outcome))
        return function() if is_over else outcome.get()


def answering(thread: CompilingThread, decide: Decide) -> Callable[[Array], list[Array]]:
    """What the table of callables has for one custom call. Other hosts, and those that compile it once more after a
    restart, get the first one's answers.
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
