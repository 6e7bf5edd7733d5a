"""What a child process prints: passed on to this process's standard error, and the end of it kept to be quoted."""

from __future__ import annotations

import collections
import contextlib
import subprocess
import sys
import threading
from typing import IO

_LINES, _BYTES = 20, 4096


class ExitMessage:
    """Reads `output` to its end, on a thread of its own."""

    def __init__(self, output: IO[bytes], name: str) -> None:
        self._output = output
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_LINES)
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while line := self._output.readline(_BYTES):  # whatever it prints without an end of a line
            self._lines.append(line)
            with contextlib.suppress(OSError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def text(self, seconds: float) -> str:
        """The last lines, of a process that has ended; waits so long for what it has printed and is yet to be read."""
        self._thread.join(seconds)
        return b"".join(self._lines)[-_BYTES:].decode(errors="replace").rstrip()


def how_it_ended(process: subprocess.Popen[bytes], words: ExitMessage, seconds: float) -> str:
    """Such as "exited with 3; its last lines: ..."."""
    status = process.wait()
    how = f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
    said = words.text(seconds)
    return how + (f"; its last lines:\n{said}" if said else "")
