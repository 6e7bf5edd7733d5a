"""The controller's process in virtual time: what `controller.main` is with sockets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from atoll.controller.core import Controller
from atoll.controller.events import apply
from atoll.controller.programs.registered import RegisteredProgram
from atoll.operate.engines.virtual.clock import VirtualClock
from atoll.operate.engines.virtual.costs import Costs
from atoll.processes.leases import PING_SECONDS
from atoll.protocol import messages as m

# By ("host", number) or ("session", number).
Deliver = Callable[[tuple[str, int], Any], None]


class ControllerProcess:
    """One thread: hears all that has come while it was busy, then sends what came of it, message after message.

    `deliver(destination, message)` is called when a message has arrived there.
    """

    def __init__(self, controller: Controller, clock: VirtualClock, costs: Costs, deliver: Deliver) -> None:
        self.controller = controller
        self.busy_seconds = 0.0  # so far
        self._clock = clock
        self._costs = costs
        self._deliver = deliver
        self._heard: list[tuple[str, int, Any]] = []
        self._is_busy = False
        self._secret = "of the simulation"

    def send(self, what: str, who: int, message: Any = None) -> None:
        """A host ("worker") or a session's proxy ("proxy") sends, or an event of `controller.events` happens."""
        self._clock.call_later(self._costs.latency, lambda: self._arrive(what, who, message))

    def start(self) -> None:
        """All hosts have joined: they learn of one another, and are asked for signs of life from now on."""
        hosts = self.controller.resources.hosts.values()
        peers = m.Peers(tuple((host.number, host.data_address) for host in hosts), self._secret)
        for host in hosts:
            self._deliver(("host", host.number), peers)
        self._tick()

    def _tick(self) -> None:
        ping = m.Ping(self.controller.leases.seconds)
        for host in self.controller.resources.hosts:
            self._clock.call_later(self._costs.latency, partial(self._deliver, ("host", host), ping))
        self._arrive("tick", 0, None)
        self._clock.call_later(PING_SECONDS, self._tick)

    def _arrive(self, what: str, who: int, message: Any) -> None:
        self._heard.append((what, who, message))
        if not self._is_busy:
            self._is_busy = True
            self._clock.call_soon(self._work)

    def _work(self) -> None:
        """What has come by now is handled, and leaves as the work on it is done."""
        if not self._heard:
            self._is_busy = False
            return
        heard, self._heard = self._heard, []
        now = self._clock.now()
        done = now
        for what, who, message in heard:
            done += self._hearing_costs(who, message)
            apply(self.controller, now, what, who, "", message)
        started: set[int] = set()
        for destination, message in apply(self.controller, now, "flush", 0, "", None):
            done += self._telling_costs(message, started)
            self._clock.call_at(done + self._costs.latency, partial(self._deliver, destination, message))
        self.busy_seconds += done - now
        self._clock.call_at(done, self._work)

    def _hearing_costs(self, who: int, message: Any) -> float:
        costs = self._costs
        if isinstance(message, m.Done):
            return len(message.runs) * costs.controller_gang_host / 2
        if isinstance(message, m.Launch):
            program = self.controller.sessions[who].programs.get(message.program)
            gangs = len(program.gangs) if isinstance(program, RegisteredProgram) else 0
            return costs.message + gangs * costs.controller_gang / 2
        return costs.message

    def _telling_costs(self, message: Any, started: set[int]) -> float:
        """`started` are the gangs that others were already told of."""
        costs = self._costs
        if isinstance(message, m.Run):
            sequences = [message.sequence]
        elif isinstance(message, m.Dispatch):
            sequences = [sequence for sequence, _ in message.turns]
        else:
            return costs.message
        new = set(sequences) - started
        started |= new
        return len(sequences) * costs.controller_gang_host / 2 + len(new) * costs.controller_gang / 2
