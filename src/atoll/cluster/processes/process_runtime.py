"""What Atoll's processes have in common: how one is started and ended, its options, logging and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec

from atoll.cluster.printable import printable_text

Options = TypeVar("Options")


def read_options(kind: type[Options]) -> Options:
    """The process's options: one JSON argument, checked against `kind`."""
    return msgspec.json.decode(sys.argv[1].encode(), type=kind)


def write_ready(descriptor: int, line: msgspec.Struct) -> None:
    """Writes the one line that the process that started this one waits for; see `processes.child`.

    Does nothing where no process waits: `descriptor` is -1 then.
    """
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.write(descriptor, msgspec.json.encode(line) + b"\n")
            os.close(descriptor)


# Settings of Python that a user makes for a script, and that Atoll's processes do not inherit.
_OF_THE_SCRIPT = ("PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG", "PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME")


# Names of further variables that users' Python on the hosts gets of the workers' environment; "*": all.
PYTHON_ENVIRONMENT_VARIABLE = "ATOLL_PYTHON_ENVIRONMENT"


def own_environment() -> dict[str, str]:
    """This process's environment without what is for the user's script; for a process of Atoll that it starts."""
    return {name: value for name, value in os.environ.items() if name not in _OF_THE_SCRIPT}


# XLA's CPU client and NumPy take an array's memory afresh each time. In large pages, and kept by glibc instead of given
# back as soon as 128 KiB of it are free, it takes a third of the CPU time to touch.
_ARRAYS = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456"


def with_malloc_tuning(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` with settings of malloc for a process that holds arrays, unless the user has set them."""
    return {"GLIBC_TUNABLES": _ARRAYS} | environment


def trim_malloc() -> None:
    """Return the freed memory that glibc retains to the system, in a process that is idle."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def command(module: str, options: msgspec.Struct) -> list[str]:
    """The command line that starts `module` with `options`."""
    return [sys.executable, "-P", "-m", module, msgspec.json.encode(options).decode()]


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ends a child of this process: SIGTERM, and SIGKILL where it runs on for `seconds`."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_logging(name: str) -> None:
    """Warnings and worse to standard error; ATOLL_LOG=debug (or info) for more. On SIGUSR1, where each thread is."""
    faulthandler.register(signal.SIGUSR1, file=2)
    level = os.environ.get("ATOLL_LOG", "warning").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable(f"%(asctime)s atoll {name}[%(process)d] %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level if level in logging.getLevelNamesMapping() else "WARNING", handlers=[handler])


class _Printable(logging.Formatter):
    """Escapes what users chose to have in a log that an operator reads in a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_text(super().format(record))


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """For the part of a process's start that imports JAX and opens its devices: without the garbage collector.

    What that makes stays for good. To look through it again and again while it grows is a fifth of a worker's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# Objects that were made and are alive, until the garbage collector looks: Python's own bound is 700.
_COLLECT_AFTER = 50_000


def freeze_gc() -> None:
    """Exclude the objects that exist now from garbage collection, since they stay, and collect rarely.

    Modules alone are some hundred thousand objects, and a collection that visits them takes 50 ms or more. From now on
    it looks rarely: thousands of objects are alive while gangs are in flight, and hardly any refer to themselves.
    """
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


class StopEvent(asyncio.Event):
    """Set if this process is to end. `reason` is the name of the signal that asked for it."""

    reason = ""

    def set_by(self, number: signal.Signals) -> None:
        """Set it because of a signal."""
        self.reason = self.reason or number.name
        self.set()


def run_loop(main: Callable[[StopEvent], Coroutine[Any, Any, None]]) -> None:
    """Runs `main(stop)` to its end, on uvloop where it is installed; SIGTERM and SIGINT set `stop`."""

    async def body() -> None:
        stop = StopEvent()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set_by, number)
        await main(stop)

    try:
        import uvloop
    except ImportError:
        asyncio.run(body())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
    gc.freeze()  # the process ends: Python would look through all that it has once more
