"""Loads and calls the user's functions in a session's Python process.

One thread receives messages from the worker, one loads functions, and each stream has a thread for its calls. The
process ends when the worker ends or closes the link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import numpy as np

from atoll.cluster.processes.process_runtime import trim_malloc
from atoll.cluster.sandbox.grants import USER_VIEW, Sandbox, View
from atoll.errors import OK, Code, Details, Kind, Status, StatusError, shortened, traceback_of
from atoll.host_services.python.program.colocated_functions import LostObjectError, open_functions
from atoll.host_services.python.python_link import PythonLink, view
from atoll.protocol.messages import python_messages as m
from atoll.transfers.receive_buffer_pool import RECEIVE_BUFFERS

_IDLE_SECONDS = 60.0


class Stream:
    """Runs calls one after the other on a thread. After `_IDLE_SECONDS` without calls, it ends and calls `on_idle`."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        self._on_idle = on_idle
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False
        self._pending = 0

    def submit(self, run: Callable[[], None]) -> None:
        with self._lock:
            self._pending += 1
            self._queue.put(run)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._work, name="colocated-python", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return self._pending > 0

    def _work(self) -> None:
        while True:
            try:
                self._queue.get(timeout=_IDLE_SECONDS)()
            except queue.Empty:
                with self._lock:
                    if self._pending:
                        continue
                    self._runs = False
                self._on_idle()
                return
            else:
                with self._lock:
                    self._pending -= 1


class Contents:
    """The contents of arguments that have arrived. Calls wait for them here."""

    def __init__(self) -> None:
        self._arrived: dict[int, np.ndarray[Any, Any]] = {}
        self._failed: dict[int, Status] = {}  # by call
        self._unwanted: set[int] = set()  # feeds of calls that have ended before they arrived
        self._change = threading.Condition()

    def put(self, feed: int, contents: np.ndarray[Any, Any]) -> None:
        with self._change:
            if feed in self._unwanted:
                self._unwanted.discard(feed)
                return
            self._arrived[feed] = contents
            self._change.notify_all()

    def fail(self, call: int, status: Status) -> None:
        with self._change:
            self._failed[call] = status
            self._change.notify_all()

    def take(self, call: int, argument: m.Argument) -> list[np.ndarray[Any, Any]]:
        """Wait for the shards of an argument. Raise StatusError if the worker cannot send them."""
        with self._change:
            self._change.wait_for(lambda: call in self._failed or all(feed in self._arrived for feed in argument.feeds))
            self._failed.get(call, OK).raise_if_error()
            shards = [self._arrived.pop(feed) for feed in argument.feeds]
        return [view(shard, argument.dtype, argument.shape) for shard in shards]

    def take_one(self, call: int, feed: int, argument: m.Argument) -> np.ndarray[Any, Any]:
        """Wait for one shard of an argument. Raise StatusError if the worker cannot send it."""
        (shard,) = self.take(call, msgspec.structs.replace(argument, feeds=(feed,)))
        return shard

    def end(self, call: int, left: Iterable[int]) -> None:
        """Drop the feeds that a call has not taken before it ended."""
        with self._change:
            self._failed.pop(call, None)
            for feed in left:
                if self._arrived.pop(feed, None) is None:
                    self._unwanted.add(feed)


class Arguments:
    """The arguments of one call, which either iterates over whole arguments or requests single shards.

    Requested shards stay in the worker's shared memory, so the call must limit how many it holds.
    """

    def __init__(self, call: m.Call, contents: Contents, ask: Callable[[m.Wanted], None]) -> None:
        self._call = call
        self._contents = contents
        self._ask = ask
        self._left = list(reversed(call.arguments))
        self._asked: dict[int, None] = {}  # feeds

    def __iter__(self) -> Iterator[list[np.ndarray[Any, Any]]]:
        while self._left:
            shards = self._contents.take(self._call.number, self._left[-1])
            self._left.pop()
            yield shards

    def ask(self, argument: m.Argument, shard: int) -> None:
        feed = argument.feeds[shard]
        self._asked[feed] = None
        self._ask(m.Wanted(self._call.number, feed))

    def take(self, argument: m.Argument, shard: int) -> np.ndarray[Any, Any]:
        """Wait for a requested shard. Raise StatusError if the worker cannot send it."""
        feed = argument.feeds[shard]
        found = self._contents.take_one(self._call.number, feed, argument)
        del self._asked[feed]
        return found

    def end(self) -> None:
        """Drop the contents that the call has not taken."""
        unasked = [feed for argument in self._left for feed in argument.feeds] if not self._call.asks else []
        self._contents.end(self._call.number, [*self._asked, *unasked])


class Runner:
    """Handles the worker's messages.

    `functions` is a `colocated_functions.Functions`. `sandbox` is the sandbox of this process: if it denies access to a
    file, the error names the setting that grants it.
    """

    def __init__(self, link: PythonLink, functions: Any, sandbox: Sandbox = USER_VIEW) -> None:
        self._link = link
        self._sandbox = sandbox
        self._functions = functions
        self._loaded: dict[str, Future[Any]] = {}
        self._loads = Stream(lambda: None)
        self._streams: dict[int, Stream] = {}
        self._held: dict[int, threading.Event] = {}  # failed calls that hold back the later calls of their streams
        self._contents = Contents()
        self._feed = 0
        self._feed_lock = threading.Lock()

    def run(self, isolated: bool) -> None:
        """Handle messages until the worker closes the link."""
        self._link.send(m.PythonReady(isolated))
        RECEIVE_BUFFERS.open()
        self._link.receive(self._handle, self._contents.put, memory=RECEIVE_BUFFERS.take)

    def _handle(self, message: Any) -> None:
        match message:
            case m.Load():
                # Calls may arrive before the function is loaded.
                loading: Future[Any] = Future()
                self._loaded[message.function] = loading
                self._loads.submit(lambda: self._load(message, loading))
            case m.Call(function=name, stream=number):
                self._submit(number, self._bound(message, self._loaded.get(name) or _missing_function(name)))
            case m.Hold(number=number, stream=stream):
                resumed = self._held[number] = threading.Event()
                self._submit(stream, partial(_wait, resumed))
            case m.InputFailed(number=number, status=status):
                self._contents.fail(number, status)
            case m.Resume(number=number):
                held = self._held.pop(number, None)
                if held is not None:
                    held.set()
            case m.Drop(function=name):
                self._drop(self._loaded.pop(name, None))

    def _submit(self, number: int, run: Callable[[], None]) -> None:
        """Run this on a stream, after what was submitted to it before."""
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = Stream(self._stream_is_idle)
        stream.submit(run)

    def _stream_is_idle(self) -> None:
        if not any(each.is_busy for each in list(self._streams.values())):
            trim_malloc()

    def _drop(self, function: Future[Any] | None) -> None:
        """Release a function after all earlier calls have run, because these may need its objects."""
        for stream in [each for each in self._streams.values() if each.is_busy]:
            stream.submit(partial(_clear, [function]))

    def _load(self, message: m.Load, loading: Future[Any]) -> None:
        status = OK
        try:
            loading.set_result(self._functions.load(message.source, message.recompile))
        except BaseException as error:
            status = _failed(f"{message.source.name} cannot be loaded on {os.uname().nodename}", error, self._sandbox)
            loading.set_exception(RuntimeError(status.message))
        with contextlib.suppress(OSError):  # the worker has ended
            self._link.send(m.Loaded(message.function, status))

    def _bound(self, call: m.Call, function: Future[Any]) -> Callable[[], None]:
        """Bind a call to its function, which may be dropped while the call waits. After the call, neither is held."""
        held = [function]

        def run() -> None:
            returned = self._call(call, held)
            self._functions.release_memory()
            resumed = threading.Event()
            if call.holds and not returned.status.ok:
                self._held[call.number] = resumed
            else:
                resumed.set()
            with contextlib.suppress(OSError):
                self._link.send(returned)
            resumed.wait()

        return run

    def _call(self, call: m.Call, held: list[Future[Any]]) -> m.Returned:
        arguments = Arguments(call, self._contents, self._link.send)
        try:
            shards = held.pop().result()(call, arguments)
            return m.Returned(call.number, OK, tuple(tuple(map(self._send, each)) for each in shards))
        except BaseException as error:
            return m.Returned(call.number, _failed("a Python function on the host raised", error, self._sandbox))
        finally:
            arguments.end()

    def _send(self, shard: np.ndarray[Any, Any]) -> int:
        with self._feed_lock:
            self._feed += 1
            feed = self._feed
        self._link.send_array(feed, shard)
        return feed


def _clear(held: list[Any]) -> None:
    held.clear()


def _wait(event: threading.Event) -> None:
    event.wait()


def _missing_function(name: str) -> Future[Any]:
    """Return a failed future in place of a function that was not loaded or was dropped."""
    missing: Future[Any] = Future()
    missing.set_exception(LookupError(f"function {name} is not in this process"))
    return missing


def _failed(what: str, error: BaseException, sandbox: Sandbox) -> Status:
    """Return the status of a StatusError, or a status with the traceback of a user's exception."""
    if isinstance(error, StatusError):
        return error.status
    text = f"{what}:\n{traceback_of(error, os.path.dirname(__file__))}"
    status = Status(Code.INTERNAL, shortened("\n".join((text.rstrip("\n"), *_hints(error, sandbox)))))
    return status.with_details(Details(Kind.PYTHON)) if isinstance(error, LostObjectError) else status


def _hints(error: BaseException, sandbox: Sandbox) -> Iterator[str]:
    """Yield advice on how to grant access if the sandbox may have caused this error."""
    if isinstance(error, ModuleNotFoundError) and sandbox.view is View.GRANTED:
        yield (
            "Modules are imported from the packages of the worker and from granted directories: install the package on "
            "the hosts, or send its functions by value (cloudpickle.register_pickle_by_value)"
        )
    if isinstance(error, OSError) and isinstance(error.filename, str):
        path = os.path.abspath(error.filename)
        is_write = error.errno in (errno.EROFS, errno.EACCES)
        if is_write or not os.path.isdir(os.path.dirname(path)):
            yield from filter(None, [sandbox.refusal(path, is_write)])


def run(options: m.PythonOptions, isolated: bool) -> None:
    """Run the process until its worker closes the link, then exit without waiting for user threads."""
    with contextlib.suppress(OSError):
        os.chdir(options.settings.directory or options.sandbox.scratch)
    link = PythonLink(socket.socket(fileno=options.descriptor), m.ToPython)
    with contextlib.suppress(EOFError, OSError):
        Runner(link, open_functions(options), options.sandbox).run(isolated)
    os._exit(0)
