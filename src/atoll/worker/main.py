"""The worker process: one a host. Control messages on the event loop, everything else on threads."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from typing import Any

import msgspec

from atoll._version import __version__
from atoll.errors import Status, status_of
from atoll.transport import messages as m
from atoll.transport.address import check_may_listen, parse_address
from atoll.transport.connection import Connection, connect
from atoll.transport.lifeline import watch_in_thread
from atoll.transport.process import read_options, run_loop, start_logging

_log = logging.getLogger(__name__)


class WorkerOptions(msgspec.Struct, frozen=True):
    """How to start a worker. `parent` is the process that it must not outlive."""

    controller: str
    data_address: str
    island: int
    host: int
    devices: int
    parent: int
    cache_directory: str = ""


class Worker:
    """Carries messages between the control connection and the threads that do the work."""

    def __init__(self, options: WorkerOptions, stop: asyncio.Event) -> None:
        # JAX is imported here and not above: its environment and flags are set first.
        from atoll.worker.data_port import DataPort, Inbox
        from atoll.worker.executor import Executor
        from atoll.worker.functions import Functions
        from atoll.worker.store import TypeKeys
        from atoll.worker.xla import Backend, self_test

        self.options = options
        self.stop = stop
        self.loop = asyncio.get_running_loop()
        self.connection: Connection | None = None
        self._outgoing: deque[Any] = deque()
        self._wake_scheduled = False
        self.backend = Backend()
        self_test(self.backend)
        keys = TypeKeys()
        self.inbox = Inbox(lambda session, feed: self.report(m.Arrived(session, (feed,))))
        address = parse_address(options.data_address)
        check_may_listen(address, os.environ.get(m.DEFAULT_TOKEN_VARIABLE, ""))
        self.data_port = DataPort(address, self.inbox)
        self.functions = Functions(self.backend, self.inbox, keys, self.report)
        self.executor = Executor(self.backend, self.functions, self.data_port, keys, self.report)
        self.executor.set_host(options.host)

    async def join(self) -> None:
        self.connection = await connect(
            parse_address(self.options.controller),
            m.ToWorker,
            self.on_message,
            self.on_lost,
            name="the controller",
        )
        token = os.environ.get(m.DEFAULT_TOKEN_VARIABLE, "")
        self.connection.send(m.Hello(m.PROTOCOL, "worker", token, os.getpid(), __version__))
        self.connection.send(
            m.WorkerReady(
                self.options.island,
                self.options.host,
                self.backend.describe(),
                self.backend.platform,
                self.backend.platform_version,
                str(self.data_port.address),
            )
        )

    def on_message(self, message: Any) -> None:
        match message:
            case m.Run() | m.Free() | m.KeepPlan() | m.DropPlan():
                self.executor.submit(message)
            case m.OpenStore():
                self.executor.submit(message)
                self.data_port.open_session(message.session, message.secret)
            case m.CloseStore():
                self.executor.submit(message)
                self.data_port.close_session(message.session)
            case m.Compile():
                self.functions.compile(message)
            case m.DropFunction(function=function):
                self.functions.drop(function)
            case m.Query():
                self.loop.run_in_executor(None, self._answer, message)
            case m.Peers(hosts=hosts, secret=secret):
                self.data_port.set_peers(hosts, secret)
            case m.Stop():
                self.stop.set()
            case m.Refused(status=status):
                _log.error("the controller refused this worker: %s", status)
                self.stop.set()

    def _answer(self, query: m.Query) -> None:
        try:
            if query.what == "layout":
                dtype, shape, ordinal = msgspec.msgpack.decode(
                    query.payload, type=tuple[str, tuple[int, ...], int]
                )
                payload = self.backend.default_layout(dtype, shape, ordinal).encode()
            else:
                payload = self.functions.answer(query.what, query.subject)
            self.report(m.Answer(query.session, query.query, Status(), payload))
        except Exception as error:
            self.report(m.Answer(query.session, query.query, status_of(error), b""))

    def on_lost(self, reason: str) -> None:
        _log.info("the controller is gone (%s): this worker ends", reason)
        self.stop.set()

    def report(self, message: Any) -> None:
        """Sends a message to the controller; callable from any thread. Messages of one burst go together."""
        self._outgoing.append(message)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self.loop.call_soon_threadsafe(self._send_reports)

    def _send_reports(self) -> None:
        self._wake_scheduled = False
        outgoing = self._outgoing
        assert self.connection is not None
        done: list[tuple[int, int, int]] = []
        while outgoing:
            message = outgoing.popleft()
            if type(message) is m.Done:
                done.extend(message.runs)
                continue
            if done:
                self.connection.send(m.Done(tuple(done)))
                done = []
            self.connection.send(message)
        if done:
            self.connection.send(m.Done(tuple(done)))


async def serve(options: WorkerOptions, stop: asyncio.Event) -> None:
    worker = Worker(options, stop)
    await worker.join()
    await stop.wait()


def set_up_jax(options: WorkerOptions) -> None:
    """Everything that must be set before JAX makes its backend."""
    import jax

    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.cache_directory:
        jax.config.update("jax_compilation_cache_dir", options.cache_directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main() -> None:
    options = read_options(WorkerOptions)
    start_logging("worker")
    # XLA may hang or compute for long inside a call: nothing in this process can keep it from ending with its parent.
    watch_in_thread(options.parent, lambda: os._exit(0))
    # Three threads share the interpreter's lock here; the default of 5 ms would be most of a launch's latency.
    sys.setswitchinterval(5e-4)
    set_up_jax(options)
    run_loop(lambda stop: serve(options, stop))
    # Threads may still be inside XLA; what they hold goes with the process.
    os._exit(0)


if __name__ == "__main__":
    main()
