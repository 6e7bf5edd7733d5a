"""A host's process in virtual time: the counterpart of `engines.null_hosts.null_hosts_main`, which uses sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import msgspec

from atoll.decodable import decodable
from atoll.devices.null.model import NullModel
from atoll.devices.null.null_backend import Collectives
from atoll.engines.null_hosts.null_host import AtOnce, NullHost
from atoll.errors import unimplemented
from atoll.ir.plan import Plan, Report
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.transfers.transfer_engine import Contents
from atoll.virtual.simulated_costs import Costs
from atoll.virtual.virtual_time import VirtualClock
from atoll.worker.read_threads import ReadThreads


class VirtualDataPort:
    """Replaces a data port. Contents arrive at once: the model delays the send until their modeled arrival."""

    def __init__(self, inbox: Inbox, inboxes: Mapping[int, Inbox]) -> None:
        self.inbox = inbox
        self._inboxes = inboxes

    def to_host(self, host: int) -> _Channel:
        return _Channel(self._inboxes[host])

    def open_session(self, session: int, secret: str) -> None:
        """Do nothing: the port serves all sessions."""

    def close_session(self, session: int) -> None:
        """Do nothing: the host drops the session's contents."""

    def set_peers(
        self, hosts: tuple[tuple[int, str], ...], secret: str, admitted: frozenset[str], lease: float
    ) -> None:
        """Do nothing: all inboxes are known."""


class _Channel:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def send_contents(self, session: int, feed: int, contents: Contents) -> None:
        self._inbox.put(session, feed, b"".join(contents.views()))


class VirtualHostProcess:
    """A process that handles one message after another; each takes the time that `costs` gives.

    `send(message)` delivers a message to the controller. `inboxes` holds the inboxes of all hosts and `neighbors`
    the inboxes of the island; the constructor adds this host's inbox to both.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        devices: int,
        model: NullModel,
        clock: VirtualClock,
        costs: Costs,
        collectives: Collectives,
        inboxes: MutableMapping[int, Inbox],
        neighbors: MutableMapping[int, Inbox],
        send: Callable[[Any], None],
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._free_at = 0.0

        def report(*messages: Any) -> None:
            for message in messages:
                send(message)

        self.host = NullHost(
            number,
            rank,
            devices,
            model=model,
            clock=clock,
            collectives=collectives,
            neighbors=neighbors,
            make_port=lambda inbox: VirtualDataPort(inbox, inboxes),
            report=report,
            renew=lambda lease: None,
            call_soon=lambda call: self._do(costs.message, call),
            read_threads=ReadThreads(AtOnce()),
            send=lambda host, content, in_pieces=False: None,  # no relay groups in virtual time
            dispatch_soon=lambda call: self._do(costs.host_gang, call),
        )
        inboxes[number] = neighbors[number]

    def handle(self, message: Any) -> None:
        gangs = 0
        if isinstance(message, m.Run):
            gangs = 1
        elif isinstance(message, m.Dispatch):
            gangs = len(message.units)
        elif isinstance(message, m.RegisterPlan):
            message = decoded(message)
            steps = (step for segment in message.definition.segments for step in segment.steps)
            if any(isinstance(step, Report) for step in steps):
                raise unimplemented("control flow cannot run in virtual time, where arrays have no contents")
        self._do(gangs * self._costs.host_gang or self._costs.message, partial(self._handle, message))

    def _handle(self, message: Any) -> None:
        self.host.handle(message)

    def _do(self, seconds: float, call: Callable[[], None]) -> None:
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        self._clock.call_at(self._free_at, call)


def decoded(message: m.RegisterPlan) -> m.RegisterPlan:
    """Return the message with its plan as an object. The controller encodes large plans before it sends them."""
    plan: Any = message.definition
    if not isinstance(plan, msgspec.Raw):
        return message
    return msgspec.structs.replace(message, definition=msgspec.msgpack.decode(plan, type=decodable(Plan)))
