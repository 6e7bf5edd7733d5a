"""The parent's end of a worker: start it, send it requests with deadlines, and end it with its children."""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.harness.backends import environment_of
from benchmarks.harness.benchmark import Benchmark, Settings
from benchmarks.harness.messages import Failed, Measured, PrepareRequest, Reply, Request, RoundRequest

GRACE = 5.0  # seconds that a worker has beyond a deadline to say itself where it was


class ContestantError(Exception):
    """A backend failed in a benchmark: its error, or that it died or was late, with the end of its log."""


class Child:
    """A worker process of `settings.backend`, with one benchmark prepared. A context manager."""

    def __init__(self, benchmark: Benchmark, settings: Settings) -> None:
        """Raises ContestantError if the preparation fails or passes its deadline."""
        self._benchmark = benchmark
        self._decoder = msgspec.json.Decoder(Reply)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.worker"],
            env=environment_of(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,
        )
        try:
            prepare = benchmark.prepare_of.get(settings.backend, benchmark.prepare)
            self._ask(PrepareRequest(prepare, settings, benchmark.prepare_deadline))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def measure(self) -> Mapping[str, float]:
        """One round. Raises ContestantError."""
        reply = self._ask(RoundRequest(self._benchmark.round_deadline))
        assert isinstance(reply, Measured), reply
        return reply.values

    def close(self) -> None:
        """The worker ends at the end of its input; what is left of its process group after 10 s is killed."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        end_group(self._process)
        self._process.stdout.close()
        self._log.close()

    def _ask(self, request: Request) -> Reply:
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        line = read_line(self._process, time.monotonic() + request.deadline + GRACE)
        if not line:
            end_group(self._process)
            raise ContestantError(
                f"the worker ended with status {self._process.wait()} or passed its deadline of"
                f" {request.deadline:.0f} s; the end of its log:\n{self._log_tail()}"
            )
        reply: Reply = self._decoder.decode(line)
        if isinstance(reply, Failed):
            raise ContestantError(f"{reply.error}the end of its log:\n{self._log_tail()}")
        return reply

    def _log_tail(self, size: int = 3000) -> str:
        self._log.seek(0)
        return self._log.read()[-size:].decode(errors="replace")


def read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """A line of a process's output; empty if it ended or the deadline (monotonic clock) passed first."""
    assert process.stdout
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return b""
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                return b""
            line += piece
    return line


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a process that leads its own process group, and of its children there."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
