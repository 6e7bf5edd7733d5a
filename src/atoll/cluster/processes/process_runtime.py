"""The common parts of Atoll's processes: options, environment, event loop, garbage collection, start, end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec

from atoll.decodable import decodable

Options = TypeVar("Options")
_PARENT_READ_SECONDS = 0.5  # for a parent process to read a line


def read_options(kind: type[Options]) -> Options:
    """Return the options of this process from its JSON argument, validated against `kind`."""
    return msgspec.json.decode(sys.argv[1].encode(), type=decodable(kind))


def write_ready(descriptor: int, line: msgspec.Struct, *, is_last: bool = True) -> None:
    """Write a line that the parent process waits for; see `processes.child`. Do nothing if `descriptor` is -1."""
    if descriptor < 0:
        return
    with contextlib.suppress(OSError):  # the parent process may have ended, or read no further lines
        os.write(descriptor, msgspec.json.encode(line) + b"\n")
    if is_last:
        os.close(descriptor)


def tell_parent(descriptor: int, line: msgspec.Struct) -> None:
    """Write the last line for the parent process, and wait a moment until the parent has read it and closed the pipe.

    Do nothing if `descriptor` is -1.
    """
    write_ready(descriptor, line, is_last=False)
    if descriptor >= 0:
        poller = select.poll()
        poller.register(descriptor, 0)  # an error when no process has the other end
        poller.poll(_PARENT_READ_SECONDS * 1000)
        os.close(descriptor)


# Settings of Python for the user's script, which Atoll's processes do not inherit.
_OF_THE_SCRIPT = ("PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG", "PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME")


def own_environment() -> dict[str, str]:
    """Return this process's environment, without settings for the user's script, for a child process of Atoll."""
    return {name: value for name, value in os.environ.items() if name not in _OF_THE_SCRIPT}


# XLA's CPU client and NumPy allocate new memory for each array. Touching it takes a third of the CPU time with huge
# pages, and if glibc keeps free memory instead of returning it to the system from 128 KiB on.
_ARRAYS = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456"


def with_malloc_tuning(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` with malloc settings for a process that holds arrays, unless the user has set them."""
    return {"GLIBC_TUNABLES": _ARRAYS} | environment


def trim_malloc() -> None:
    """Return the freed memory that glibc retains to the system, in a process that is idle."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def command(module: str, options: msgspec.Struct) -> list[str]:
    """Return the command line that starts `module` with `options`."""
    return [sys.executable, "-P", "-m", module, msgspec.json.encode(options).decode()]


def open_standard_streams() -> None:
    """Open those of standard input, output and error that are closed, on /dev/null.

    Otherwise the next pipes and sockets of this process would take their numbers. Libraries would print into them, and
    child processes would not inherit them. Call it before starting child processes.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number, which is `descriptor`


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a child process with SIGTERM, and with SIGKILL if it still runs after `seconds`."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Disable the garbage collector while a process imports JAX and opens its devices.

    These objects are permanent, and collections would take a fifth of a worker's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_COLLECT_AFTER = 50_000  # new objects between two garbage collections; Python's default is 700


def freeze_gc() -> None:
    """Exclude the present objects from garbage collection, since they are permanent, and collect rarely.

    Modules have some hundred thousand objects, and a collection that visits them takes 50 ms or more. Later objects
    hardly ever form cycles, but there are thousands of them while gangs are in flight.
    """
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a command as SIGINT does, without those that its caller ignores, as nohup does."""
    return [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]


Result = TypeVar("Result")


class StopEvent(asyncio.Event):
    """Set when this process is asked to end. `reason` is the name of the signal that asked for it."""

    reason = ""

    def set_by(self, number: signal.Signals) -> None:
        """Set the event because of a signal."""
        self.reason = self.reason or number.name
        self.set()

    async def wait_with(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return the result of the work, or cancel it and return None once this process is asked to end."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()


def run_loop(main: Callable[[StopEvent], Coroutine[Any, Any, None]]) -> None:
    """Run `main(stop)` to its end, on uvloop if it is installed. SIGTERM and SIGINT set `stop`.

    Enable the garbage collector, which main modules disable while they are imported, and exclude the present objects
    from it.
    """

    async def body() -> None:
        stop = StopEvent()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set_by, number)
        await main(stop)

    try:
        import uvloop
    except ImportError:
        make_loop = None
    else:
        make_loop = uvloop.new_event_loop
    gc.freeze()
    gc.enable()
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(body())
    gc.freeze()  # so that Python does not visit all objects again at exit


def fork_quietly() -> int:
    """Call `os.fork` without the warnings about threads.

    Python and JAX warn about locks that other threads may hold. The child must take none of these, and must end with
    `os._exit`. Raise OSError if the fork fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()
