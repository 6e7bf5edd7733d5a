"""A separate Python process that runs functions of test modules with the backend that its environment selects.

The child imports the test's module and looks the function up by its name. Arguments and results are pickled. The same
function can run in the test's process, on stock JAX, and in the child, on Atoll.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tests.forked_process import Popen

ROOT = Path(__file__).parents[2]
CALL_SECONDS = 300.0
_END_SECONDS = 120.0


class RemoteError(Exception):
    """Raised if a function raised in the child. `kind` is the name of the exception's class."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.add_note(trace)


class RemotePython:
    """Child process with pipes to it. `close` ends it and returns its standard error."""

    def __init__(self, environment: dict[str, str], directory: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        self.directory = directory
        self._errors = directory / "stderr"
        with open(self._errors, "wb") as errors:
            self.process = Popen(
                [sys.executable, "-m", __name__, str(theirs[0]), str(ours[1])],
                env=environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=(theirs[0], ours[1]),
                start_new_session=True,
            )
        os.close(theirs[0])
        os.close(ours[1])
        self._answers = open(ours[0], "rb", buffering=0)  # noqa: SIM115
        self._questions = open(theirs[1], "wb")  # noqa: SIM115

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a function in the child, and return its result. Raise RemoteError if it raised."""
        self.begin(function, *arguments)
        return self.finish(seconds)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a call of a function in the child. `finish` waits for its end."""
        try:
            pickle.dump((function, arguments), self._questions)
            self._questions.flush()
        except BrokenPipeError:
            raise AssertionError(f"the child has ended, with {self.process.wait(5)}\n{self.errors()}") from None

    def finish(self, seconds: float = CALL_SECONDS) -> Any:
        kind, value = self._answer(time.monotonic() + seconds)
        if kind == "value":
            return value
        raise RemoteError(*value)

    def _answer(self, deadline: float) -> Any:
        data = bytearray()
        wanted = 8
        while len(data) < wanted:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.process.kill()  # a late result would be mistaken for the next one
                raise AssertionError(f"no answer from the child in time\n{self.errors()}")
            part = self._answers.read(1 << 20)
            if not part:
                raise AssertionError(f"the child ended with status {self.process.wait(5)}\n{self.errors()}")
            data += part
            if wanted == 8 and len(data) >= 8:
                wanted = 8 + int.from_bytes(data[:8], "little")
        return pickle.loads(memoryview(data)[8:])

    def errors(self) -> str:
        """Return the child's standard output and error so far."""
        return self._errors.read_text(errors="replace")

    def close(self) -> str:
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the child does not end\n{self.errors()}") from None
        finally:
            self._answers.close()
        return self.errors()


StartPython = Callable[..., RemotePython]


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            function, arguments = pickle.load(questions)
        except EOFError:
            return
        answer: tuple[str, Any]
        try:
            if "tests.conftest" in sys.modules:
                raise ImportError("the module of the test imports tests.conftest, which changes this environment")
            answer = ("value", function(*arguments))
        except BaseException as error:
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        data = pickle.dumps(answer)
        answers.write(len(data).to_bytes(8, "little") + data)
        answers.flush()


if __name__ == "__main__":
    # The tests start hundreds of children. Imports make no garbage, and collecting it would take a tenth of their time.
    gc.disable()
    import jax  # noqa: F401

    gc.freeze()
    gc.enable()
    with open(int(sys.argv[1]), "rb") as _questions, open(int(sys.argv[2]), "wb") as _answers:
        _serve(_questions, _answers)
    # As at the end of a script, but without finalizing the interpreter, which would take another tenth of the time.
    atexit._run_exitfuncs()
    os._exit(0)
