"""The controller process: sockets, a clock and random numbers around `core.Controller`, which decides everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.cluster.processes.leases import PING_SECONDS
from atoll.cluster.processes.lifeline import watch_in_loop
from atoll.cluster.processes.process import read_options, run_loop, spare_collector, start_logging
from atoll.cluster.security.access import HOST_TOKEN_VARIABLE
from atoll.cluster.security.joiners import Joiners
from atoll.cluster.tenants import kept_tenants
from atoll.cluster.usage.keeper import Keeper
from atoll.controller.core import Controller
from atoll.controller_process.options import ControllerOptions
from atoll.errors import AtollError
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.telemetry.load import LoadMeter
from atoll.wire.address import check_may_listen, parse_address
from atoll.wire.connection import Connection
from atoll.wire.endpoints import listen
from atoll.wire.framing import encode

_log = logging.getLogger(__name__)

# For the last replies to leave.
_END_SECONDS = 0.05


class ControllerShell:
    """Turns what happens into events, and does what the controller decides once in each turn of the loop."""

    def __init__(
        self,
        options: ControllerOptions,
        token: str,
        stop: asyncio.Event,
        host_token: str = "",
        has_tls: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = time.monotonic  # as the loop's, but for that of uvloop, which counts milliseconds
        settings = msgspec.structs.replace(options.settings, tenants=kept_tenants(options.directory))
        self._controller = Controller(settings, token, host_token=host_token)
        self.joiners = Joiners(options.directory, self._controller.tokens) if has_tls else None
        self.keeper = Keeper(options.usage_file, options.cache_directory)
        self._ready_fd = options.ready_fd
        self._stop = stop
        self._connections: dict[int, Connection] = {}
        self._next = 1
        self._flush_scheduled = False
        self._encoded: tuple[Any, bytes] = (None, b"")  # the last message that was sent, and its frame
        self._load = LoadMeter(self._connections, self._clock)
        self._turn = 0.0  # when the first event of this turn came
        self._does: dict[type[Any], Callable[[Any], None]] = {
            a.Send: self._send,
            a.Close: self._close,
            a.Name: self._name,
            a.SetTimer: self._set_timer,
            a.ReportReady: self._report_ready,
            a.End: self._end,
            a.KeepUsage: lambda action: self.keeper.keep_usage(action.present_ns, action.usage),
            a.KeepEstimates: lambda action: self.keeper.keep_estimates(action.estimates),
            a.AnswerUsage: self._answer_usage,
        }

    # ---- events

    def start(self) -> None:
        self._handle(e.Started(self._clock()))
        estimates = self.keeper.read_estimates()
        if estimates:
            self._handle(e.EstimatesRead(self._clock(), estimates))
        self._tick()

    def accept(self) -> Connection:
        """A connection that somebody opens; it counts once its handshake is done, where it has one."""
        number = self._next
        self._next += 1
        handle, clock, received = self._handle, self._clock, e.Received

        def on_message(message: Any) -> None:
            handle(received(clock(), number, message))

        def on_lost(reason: str) -> None:
            connection = self._connections.pop(number, None)
            if connection is not None:
                self._load.closed(connection)
            handle(e.ConnectionLost(clock(), number, reason))

        def on_made(connection: Connection) -> None:
            if self.joiners is not None and not connection.peer_role:
                self.joiners.serve(connection)
                return
            self._connections[number] = connection
            handle(e.ConnectionOpened(clock(), number, os.urandom(16).hex(), connection.peer_role))

        return Connection(m.ToController, on_message, on_lost, name="a client of the controller", on_made=on_made)

    def stop(self) -> None:
        """Workers are asked to end. Returns once what was decided is on its way."""
        self._handle(e.StopAsked(self._clock()))
        self._flush()

    def _tick(self) -> None:
        self._loop.call_later(PING_SECONDS, self._tick)  # first: whatever goes wrong now, workers are pinged again
        self._handle(e.Tick(self._clock(), self._load.measure(PING_SECONDS)))

    def _handle(self, event: e.AnyEvent) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._turn = event.seconds
            self._loop.call_soon(self._flush)
        self._controller.handle(event)

    # ---- actions

    def _flush(self) -> None:
        self._flush_scheduled = False
        does, load, now = self._does, self._load, self._clock()
        if now - self._turn > load.longest:
            load.longest = now - self._turn
        for action in self._controller.handle(e.Flush(now)):
            does[type(action)](action)

    def _send(self, action: a.Send) -> None:
        connection = self._connections.get(action.connection)
        if connection is None:
            return
        message = action.message
        if message is not self._encoded[0]:  # many hosts in a row get the same
            self._encoded = message, encode(message)
        if action.in_pieces:
            connection.send_in_pieces(self._encoded[1])
        else:
            connection.send_encoded(self._encoded[1])

    def _close(self, action: a.Close) -> None:
        if action.reason:
            _log.warning("%s", action.reason)
        connection = self._connections.pop(action.connection, None)
        if connection is not None:
            self._load.closed(connection)
            connection.close()

    def _name(self, action: a.Name) -> None:
        connection = self._connections.get(action.connection)
        if connection is not None:
            connection.name = action.name

    def _set_timer(self, action: a.SetTimer) -> None:
        self._loop.call_later(action.seconds, lambda: self._handle(e.TimerEnded(self._clock(), action.timer)))

    def _answer_usage(self, action: a.AnswerUsage) -> None:
        def done(content: bytes) -> None:
            reply = a.Send(action.cause, action.connection, m.UsageReply(content))
            self._loop.call_soon_threadsafe(self._send, reply)

        self.keeper.report(action.by, action.seconds, action.tenant, action.expected, done)

    def _end(self, action: a.End) -> None:
        self._loop.call_later(_END_SECONDS, self._stop.set)

    def _report_ready(self, action: a.ReportReady) -> None:
        if self._ready_fd >= 0:
            os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)


async def serve(options: ControllerOptions, stop: asyncio.Event) -> None:
    token = os.environ.get(m.DEFAULT_TOKEN_VARIABLE, "")
    host_token = os.environ.get(HOST_TOKEN_VARIABLE, "")
    address = parse_address(options.listen)
    check_may_listen(address, token)
    shell = ControllerShell(options, token, stop, host_token, address.tls)
    shell.start()
    server, _ = await listen(address, shell.accept, shell.joiners.identity if shell.joiners is not None else None)
    spare_collector()
    watch_in_loop(options.parent, stop.set)
    await stop.wait()
    server.close()
    shell.stop()
    await asyncio.sleep(0)
    await asyncio.to_thread(shell.keeper.close)
    if address.is_unix:
        with contextlib.suppress(OSError):
            os.unlink(address.path)


def main() -> None:
    options = read_options(ControllerOptions)
    start_logging("controller")
    try:
        run_loop(lambda stop: serve(options, stop))
    except AtollError as error:
        sys.exit(f"atoll: {error}")


if __name__ == "__main__":
    main()
