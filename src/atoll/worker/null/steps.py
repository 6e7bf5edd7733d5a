"""Steps on null devices: what goes over a network takes the time that the model says, and carries no bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.worker.ends import ArrayEnd
from atoll.worker.functions import Functions
from atoll.worker.null.arrays import NullArray, bytes_of
from atoll.worker.null.backend import NullBackend
from atoll.worker.null.moments import Moment, Work, all_of
from atoll.worker.steps import DispatchUnit, Steps
from atoll.worker.store import Buffer, TypeKeys


class Port(Protocol):
    """As `worker.data_port.DataPort`."""

    inbox: Inbox

    def to_host(self, host: int) -> Any: ...


class NullSteps(Steps):
    """`neighbours` are the inboxes of this host's island, which are in this process, by host."""

    def __init__(
        self,
        backend: NullBackend,
        functions: Functions,
        port: Port,
        keys: TypeKeys,
        host: int,
        neighbours: Mapping[int, Inbox],
    ) -> None:
        super().__init__(backend, functions, port, keys, host)  # type: ignore[arg-type]
        self._null = backend
        self._neighbours = neighbours
        self._ici: list[Moment] = [Moment(backend.clock, 0.0)] * len(backend.lines)
        self._dcn = Moment(backend.clock, 0.0)

    def _send(self, step: p.Send, unit: DispatchUnit, values: dict[int, Buffer]) -> None:
        buffer, run = values[step.input], unit.walk.run
        array: NullArray = buffer.array
        buffer.readers.add(1)
        sent = []
        for piece in step.pieces:
            shape = tuple(stop - start for start, stop in piece.box)
            nbytes, link = bytes_of(array.dtype_name, shape), piece.shard % len(self._ici)
            gone, there = self._on_the_way(piece.host, link, nbytes, array.moment)
            there.when_known(partial(self._deliver_at, there, piece.host, run.session, run.feeds[piece.feed]))
            sent.append(gone)
        end = all_of(self._null.clock, sent)
        end.when_known(partial(end.when_over, lambda: buffer.readers.add(-1)))
        unit.waits.append(ArrayEnd(NullArray(array.dtype_name, (), end), self.deletions))

    def _on_the_way(self, host: int, ordinal: int, nbytes: int, after: Moment) -> tuple[Moment, Moment]:
        """When a message has left this host, and when it is there."""
        model, clock = self._null.model, self._null.clock
        if host == self._host:
            return after, after
        near = host in self._neighbours
        link = self._ici[ordinal] if near else self._dcn
        gone = Work(clock, nbytes / (model.ici_bandwidth if near else model.dcn_bandwidth))
        if near:
            self._ici[ordinal] = gone
        else:
            self._dcn = gone
        gone.join((link, after))
        there = Work(clock, model.ici_latency if near else model.dcn_latency)
        there.join((gone,))
        return gone, there

    def _deliver_at(self, there: Moment, host: int, session: int, feed: int) -> None:
        there.when_over(partial(self._deliver, host, session, feed))

    def _deliver(self, host: int, session: int, feed: int) -> None:
        inbox = self._inbox if host == self._host else self._neighbours.get(host)
        if inbox is not None:
            inbox.put(session, feed, b"")
        else:
            self._send_to(host, session, feed, b"\0")

    def _receive(self, step: p.Receive, run: m.Run) -> Buffer:
        done: list[Callable[[], None]] = []
        for piece in step.pieces:
            done.append(self._inbox.take(run.session, run.feeds[piece.feed])[1])
        for call in done:
            call()
        return self._buffer(self._null.put(step.array, ()), step.array)
