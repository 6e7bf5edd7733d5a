"""The controller process: sockets around the state machine."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll._version import __version__
from atoll.cluster.topology import Topology
from atoll.controller.core import Controller
from atoll.controller.events import EventLog
from atoll.controller.operators.report import report
from atoll.controller.options import ControllerOptions
from atoll.errors import AtollError, Code, Status, StatusError
from atoll.processes.leases import PING_SECONDS
from atoll.processes.lifeline import watch_in_loop
from atoll.processes.process import read_options, run_loop, spare_collector, start_logging
from atoll.protocol import messages as m
from atoll.wire.address import check_may_listen, parse_address
from atoll.wire.connection import Connection, listen

_log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
_ENGINE_SAYS_SECONDS = 0.2


@dataclass(eq=False)
class _Peer:
    connection: Connection
    hello: m.Hello | None = None
    host: int | None = None
    session: int | None = None


class ControllerServer:
    """Accepts connections, lets in who may come in, and carries messages to and from the `Controller`."""

    def __init__(self, options: ControllerOptions, token: str, stop: asyncio.Event) -> None:
        self.options = options
        self.token = token
        self.stop = stop
        settings = options.settings
        self.controller = Controller(Topology.parse(settings.islands), settings)
        self.log = EventLog(self.controller, settings, __version__)
        self.hosts: dict[int, Connection] = {}
        self.sessions: dict[int, Connection] = {}
        self._engine: dict[int, Connection] = {}  # under 0, once it has said Hello
        self._operators: dict[int, Connection] = {}  # that wait for an answer
        self._next_operator = 1
        self._places = {
            "host": self.hosts,
            "session": self.sessions,
            "engine": self._engine,
            "operator": self._operators,
        }
        self.waiting: list[_Peer] = []  # proxies that came before the cluster was complete
        self.secret = os.urandom(16).hex()
        self._flush_scheduled = False
        self.loop = asyncio.get_running_loop()

    def accept(self) -> Connection:
        peer: _Peer

        def on_message(message: Any) -> None:
            self._message(peer, message)

        def on_lost(reason: str) -> None:
            self._lost(peer, reason)

        connection = Connection(m.ToController, on_message, on_lost, name="a client of the controller")
        peer = _Peer(connection)
        self.loop.call_later(HELLO_SECONDS, self._expect_hello, peer)
        return connection

    def _tell(self, what: str, who: int = 0, text: str = "", message: Any = None) -> Any:
        """An event for the controller: see `controller.events`."""
        return self.log.tell(self.loop.time(), what, who, text, message)

    def _expect_hello(self, peer: _Peer) -> None:
        if peer.hello is None:
            peer.connection.close()

    # ---- messages

    def _message(self, peer: _Peer, message: Any) -> None:
        if peer.session is not None:
            self._from_proxy(peer, peer.session, message)
        elif peer.host is not None:
            self._tell("worker", peer.host, message=message)
        elif peer.hello is None:
            self._hello(peer, message)
        elif peer.hello.role == "worker" and isinstance(message, m.WorkerReady):
            self._worker_ready(peer, message)
        elif peer.hello.role == "engine":
            self._from_engine(message)
        elif peer.hello.role == "operator":
            self._operator(peer, message)
        else:
            self._refuse(peer, Status(Code.FAILED_PRECONDITION, f"unexpected {type(message).__name__}"))
        self._schedule_flush()

    def _hello(self, peer: _Peer, message: Any) -> None:
        if not isinstance(message, m.Hello):
            self._refuse(peer, Status(Code.FAILED_PRECONDITION, "the first message must be a Hello"))
            return
        if self.token and not hmac.compare_digest(message.token.encode(), self.token.encode()):
            self._refuse(
                peer,
                Status(Code.UNAUTHENTICATED, "this cluster asks for a token: set ATOLL_TOKEN to the cluster's"),
            )
            return
        if message.protocol != m.PROTOCOL:
            self._refuse(
                peer,
                Status(
                    Code.FAILED_PRECONDITION,
                    f"the controller (atoll {__version__}) speaks protocol {m.PROTOCOL}, the {message.role} "
                    f"(atoll {message.version}) speaks {message.protocol}: install the same atoll on both",
                ),
            )
            return
        peer.hello = message
        if message.role == "engine":
            peer.connection.name = "the engine"
            self._engine[0] = peer.connection
        elif message.role == "proxy":
            peer.connection.name = f"the proxy of {message.label or message.pid}"
            most = self.options.settings.max_sessions
            if len(self.sessions) + len(self.waiting) >= most:
                self._refuse(
                    peer,
                    Status(
                        Code.RESOURCE_EXHAUSTED,
                        f"the cluster is full: {most} sessions are open (atoll status lists them)",
                    ),
                )
            elif self.controller.resources.is_complete:
                self._open_session(peer)
            else:
                self.waiting.append(peer)

    def _open_session(self, peer: _Peer) -> None:
        assert peer.hello is not None
        session = self._tell("session opens", peer.hello.pid, peer.hello.label)
        peer.session = session.number
        self.sessions[session.number] = peer.connection
        self._schedule_flush()

    def _worker_ready(self, peer: _Peer, message: m.WorkerReady) -> None:
        assert peer.hello is not None
        resources = self.controller.resources
        topology = resources.topology
        known = resources.hosts.get(message.host)
        if (known is not None and known.state == "ready") or not 0 <= message.host < topology.host_count:
            self._refuse(peer, Status(Code.ALREADY_EXISTS, f"host {message.host} of {topology} is not expected"))
            return
        peer.host = message.host
        peer.connection.name = f"the worker of host {message.host}"
        self.hosts[message.host] = peer.connection
        complete = resources.is_complete
        self._tell("worker joins", peer.hello.pid, message=message)
        if resources.is_complete:
            everyone = tuple((h.number, h.data_address) for h in resources.hosts.values())
            for connection in self.hosts.values():
                connection.send(m.Peers(everyone, self.secret))
        if resources.is_complete and not complete:
            waiting, self.waiting = self.waiting, []
            for proxy in waiting:
                self._open_session(proxy)
            if self.options.ready_fd >= 0:
                os.write(self.options.ready_fd, b"ready\n")
                os.close(self.options.ready_fd)

    def _from_engine(self, message: Any) -> None:
        match message:
            case m.WorkerEnded():
                self._tell_of_loss("worker ended", message=message)
            case m.IslandGivenUp(island=island, text=text):
                self._tell_of_loss("island given up", island, text)
            case m.IslandEnded(island=island):
                self._tell_of_loss("island ended", island)

    def _from_proxy(self, peer: _Peer, session: int, message: Any) -> None:
        try:
            self._tell("proxy", session, message=message)
        except StatusError as error:
            _log.warning("session %d ends: %s", session, error)
            peer.connection.send(m.Closing(error.status))
            self._end_session(peer)
            peer.connection.close()

    def _operator(self, peer: _Peer, message: Any) -> None:
        match message:
            case m.StatusRequest():
                peer.connection.send(m.StatusReply(msgspec.json.encode(report(self.controller))))
            case m.DumpRequest():
                peer.connection.send(m.DumpReply(self.log.dump()))
            case m.TraceRequest(since=since):
                peer.connection.send(m.TraceReply(msgspec.msgpack.encode(self.controller.trace.spans(since))))
            case m.RemapRequest() | m.AddIslandRequest() | m.DrainRequest():
                number = self._next_operator
                self._next_operator += 1
                self._operators[number] = peer.connection
                self._tell("operator", number, message=message)
            case m.StopRequest():
                peer.connection.send(m.StopReply())
                self.loop.call_later(0.05, self.stop.set)

    def _refuse(self, peer: _Peer, status: Status) -> None:
        peer.connection.send(m.Refused(status))
        peer.connection.close()

    # ---- ends

    def _lost(self, peer: _Peer, reason: str) -> None:
        if peer in self.waiting:
            self.waiting.remove(peer)
        if peer.session is not None:
            self._end_session(peer)
        if peer.host is not None:
            # The engine knows better why, and is about to say it.
            self.loop.call_later(_ENGINE_SAYS_SECONDS, self._worker_lost, peer, peer.host, reason)
        self._schedule_flush()

    def _worker_lost(self, peer: _Peer, host: int, reason: str) -> None:
        if self.hosts.get(host) is peer.connection:
            self._tell_of_loss("worker lost", host, reason)
            self._schedule_flush()

    def _tell_of_loss(self, what: str, who: int = 0, text: str = "", message: Any = None) -> None:
        """An event by which hosts may be lost.

        The other workers of a lost island are on their way out; nothing that they still say counts.
        """
        self._tell(what, who, text, message)
        for host in [host for host in self.hosts if self.controller.resources.is_lost(host)]:
            self.hosts.pop(host).close()

    def tick(self) -> None:
        """Asks the workers for a sign of life, and the controller for what has been silent for too long."""
        ping = m.Ping(self.controller.leases.seconds)
        for connection in self.hosts.values():
            connection.send(ping)
        if self.controller.resources.is_complete:
            self._tell_of_loss("tick")
        self._schedule_flush()
        self.loop.call_later(PING_SECONDS, self.tick)

    def _end_session(self, peer: _Peer) -> None:
        assert peer.session is not None
        self.sessions.pop(peer.session, None)
        self._tell("session ends", peer.session)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        for (kind, number), message in self._tell("flush"):
            connection = self._places[kind].get(number)
            if connection is not None:
                connection.send(message)
            if kind == "operator":
                self._operators.pop(number, None)

    def stop_workers(self) -> None:
        for connection in self.hosts.values():
            connection.send(m.Stop())
            connection.close()


async def serve(options: ControllerOptions, stop: asyncio.Event) -> None:
    token = os.environ.get(m.DEFAULT_TOKEN_VARIABLE, "")
    address = parse_address(options.listen)
    check_may_listen(address, token)
    controller = ControllerServer(options, token, stop)
    server, _ = await listen(address, controller.accept)
    controller.tick()
    spare_collector()
    watch_in_loop(options.parent, stop.set)
    await stop.wait()
    server.close()
    controller.stop_workers()
    await asyncio.sleep(0)
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
