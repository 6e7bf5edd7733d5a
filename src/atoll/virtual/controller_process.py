"""The controller's process in virtual time: the counterpart of the package `controller_process`, which uses sockets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.cluster.processes.leases import PING_SECONDS
from atoll.cluster.settings import ClusterSettings
from atoll.controller.core import Controller
from atoll.launch.policy import Policy
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.programs import RegisteredProgram
from atoll.virtual.simulated_costs import Costs
from atoll.virtual.virtual_time import VirtualClock

_PID = 1  # of all peers
_VERSION = "of the simulation"


class ControllerProcess:
    """A process with one thread: it handles a batch of events, then performs the resulting actions one by one.

    Events that arrive while it is busy form the next batch.
    """

    def __init__(
        self, settings: ClusterSettings, clock: VirtualClock, costs: Costs, policy: Callable[[], Policy] | None = None
    ) -> None:
        self.controller = Controller(settings, policy=policy)
        self.busy_seconds = 0.0  # so far
        self._clock = clock
        self._costs = costs
        self._peers: dict[int, Callable[[Any], None]] = {}  # receivers of messages by connection
        self._inbox: list[Callable[[float], e.AnyEvent]] = []
        self._is_busy = False
        self._next = 1
        self.controller.handle(e.Started(clock.now()))
        clock.call_soon(self._tick)

    # ---- for peers

    def connect(self, role: str, label: str, on_message: Callable[[Any], None]) -> int:
        """Open a connection, send Hello, and return the connection's number. This takes no virtual time.

        `on_message` receives each message when it arrives at the peer.
        """
        connection = self._next
        self._next += 1
        self._peers[connection] = on_message
        self._handle_now(e.ConnectionOpened(self._clock.now(), connection, f"secret of connection {connection}"))
        self.receive_now(connection, m.Hello(m.PROTOCOL, role, "", _PID, _VERSION, label))
        return connection

    def receive_now(self, connection: int, message: Any) -> None:
        """Deliver a message like `send`, but in no virtual time, for setup before a measurement."""
        self._handle_now(e.Received(self._clock.now(), connection, message))

    def send(self, connection: int, message: Any) -> None:
        """Send a message from the peer to the controller."""
        arrived = partial(self._arrive, lambda now: e.Received(now, connection, message))
        self._clock.call_later(self._costs.latency, arrived)

    def disconnect(self, connection: int) -> None:
        """Close the connection from the peer's side."""
        arrived = partial(self._arrive, lambda now: e.ConnectionLost(now, connection, "it was closed"))
        self._clock.call_later(self._costs.latency, arrived)

    # ---- the process

    def _handle_now(self, event: e.AnyEvent) -> None:
        self.controller.handle(event)
        self._flush_now()
        while self.controller.has_work:
            self._flush_now()

    def _flush_now(self) -> None:
        for action in self.controller.handle(e.Flush(self._clock.now())):
            self._do(action, self._clock.now())

    def _tick(self) -> None:
        self._arrive(e.Tick)
        self._clock.call_later(PING_SECONDS, self._tick)

    def _arrive(self, event: Callable[[float], e.AnyEvent]) -> None:
        self._inbox.append(event)
        if not self._is_busy:
            self._is_busy = True
            self._clock.call_soon(self._work)

    def _work(self) -> None:
        """Handle the events that have arrived, and send each resulting message when its work is done."""
        if not self._inbox and not self.controller.has_work:
            self._is_busy = False
            return
        inbox, self._inbox = self._inbox, []
        now = self._clock.now()
        done = now
        for make in inbox:
            event = make(now)
            done += self._event_costs(event)
            self.controller.handle(event)
        started: set[int] = set()
        for action in self.controller.handle(e.Flush(now)):
            done += self._action_costs(action, started)
            self._do(action, done + self._costs.latency)
        self.busy_seconds += done - now
        self._clock.call_at(done, self._work)

    def _do(self, action: a.AnyAction, when: float) -> None:
        match action:
            case a.Send(connection=connection, message=message):
                if when > self._clock.now():
                    self._clock.call_at(when, partial(self._deliver, connection, message))
                else:
                    self._deliver(connection, message)
            case a.Close(connection=connection):
                self._clock.call_at(when, partial(self._close, connection))
            case a.SetTimer(timer=timer, seconds=seconds):
                self._clock.call_later(seconds, partial(self._arrive, lambda now: e.TimerEnded(now, timer)))

    def _close(self, connection: int) -> None:
        self._peers.pop(connection, None)

    def _deliver(self, connection: int, message: Any) -> None:
        on_message = self._peers.get(connection)
        if on_message is not None:
            on_message(message)

    # ---- costs

    def _event_costs(self, event: e.AnyEvent) -> float:
        costs = self._costs
        match event:
            case e.Received(message=m.Done(runs=runs)):
                return len(runs) * costs.controller_gang_host / 2
            case e.Received(connection=connection, message=m.Launch(program=number)):
                peer = self.controller.connections.peers.get(connection)
                if peer is None:  # the connection was closed, so the controller ignores the message
                    return 0.0
                program = self.controller.sessions[peer.number].programs.get(number)
                gangs = self._gangs(peer.number, program) if isinstance(program, RegisteredProgram) else 0
                return costs.message + gangs * costs.controller_gang / 2
            case e.Received(message=m.RunProgress()):
                return costs.controller_delegated_run
            case e.TimerEnded():
                return 0.0
        return costs.message

    def _gangs(self, session: int, program: RegisteredProgram) -> int:
        """Return the number of gangs that a launch of the program creates."""
        delegated = self.controller.launches.delegated_runs.program_of(self.controller.sessions[session], program)
        return sum(map(len, program.units.nodes)) if delegated is None else len(delegated.parts)

    def _action_costs(self, action: a.AnyAction, started: set[int]) -> float:
        """Return the seconds to send a message. `started` holds the gangs already sent in this batch; it is updated."""
        if not isinstance(action, a.Send):
            return 0.0
        costs, message = self._costs, action.message
        if isinstance(message, m.Run):
            sequences = [message.sequence]
        elif isinstance(message, m.Dispatch):
            sequences = [sequence for sequence, _ in message.units]
        else:
            return costs.message
        new = set(sequences) - started
        started |= new
        return len(sequences) * costs.controller_gang_host / 2 + len(new) * costs.controller_gang / 2
