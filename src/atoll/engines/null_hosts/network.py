"""The network between null hosts. A transfer takes the time of the model and carries no bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from atoll.devices.device import DeviceArray
from atoll.devices.null.null_backend import NullArray, NullBackend, bytes_of
from atoll.devices.null.sim_events import SimEvent, SimTask, all_of
from atoll.host_services.row_messages import SPAN_BYTES
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.transfers.piece_contents import Buffers
from atoll.worker.completions import ArrayCompletion, DeletionGuard
from atoll.worker.dispatch_unit import DispatchUnit
from atoll.worker.host_network import SendPort, send_to_host


class NullNetwork:
    """The `HostNetwork` of host number `host`, with the links of the model.

    `neighbours` are the inboxes of all the island's hosts, by host number; they are in this process. Messages to other
    hosts use the port.
    """

    def __init__(self, backend: NullBackend, port: SendPort, host: int, neighbours: Mapping[int, Inbox]) -> None:
        self._backend = backend
        self._port = port
        self._host = host
        self._neighbours = neighbours
        self._ici: list[SimEvent] = [SimEvent(backend.clock, 0.0)] * len(backend.lines)
        self._dcn = SimEvent(backend.clock, 0.0)
        self._deletions = DeletionGuard()  # unused: nothing deletes sent arrays

    def send(self, step: p.Send, unit: DispatchUnit, array: DeviceArray, release: Callable[[], None]) -> None:
        assert isinstance(array, NullArray)
        run = unit.plan_run.run
        departures = []
        for piece in step.pieces:
            shape = tuple(stop - start for start, stop in piece.box)
            nbytes, link = bytes_of(array.dtype_name, shape), piece.shard % len(self._ici)
            departure, arrival = self._transmit(piece.host, link, nbytes, array.moment)
            arrival.when_known(partial(self._deliver_at, arrival, piece.host, run.session, run.host_feeds + piece.feed))
            departures.append(departure)
        self._end(unit, departures, array.dtype_name, release)

    def receive(self, step: p.Receive, run: m.Run) -> NullArray:
        self._take(run, step.feeds)
        return self._backend.put(step.array, ())

    def send_rows(
        self, step: p.SendRows, unit: DispatchUnit, arrays: Sequence[DeviceArray], release: Callable[[], None]
    ) -> None:
        """Send empty spans: null devices compute no rows."""
        run = unit.plan_run.run
        inputs = [array for array in arrays if isinstance(array, NullArray)]
        ready = all_of(self._backend.clock, [array.moment for array in inputs])
        departures = []
        for exchange, host, feed in step.messages:
            groups = exchange.message(self._host, host).groups
            departure, arrival = self._transmit(host, 0, SPAN_BYTES * len(groups), ready)
            arrival.when_known(partial(self._deliver_at, arrival, host, run.session, run.host_feeds + feed))
            departures.append(departure)
        self._end(unit, departures, inputs[0].dtype_name, release)

    def receive_rows(self, step: p.ReceiveRows, unit: DispatchUnit) -> tuple[NullArray, NullArray | None]:
        self._take(unit.plan_run.run, step.feeds)
        spans = None if step.spans_array is None else self._backend.put(step.spans_array, ())
        return self._backend.put(step.array, ()), spans

    def _end(self, unit: DispatchUnit, departures: list[SimEvent], dtype: str, release: Callable[[], None]) -> None:
        end = all_of(self._backend.clock, departures)
        end.when_known(partial(end.when_over, release))
        unit.completions.append(ArrayCompletion(NullArray(dtype, (), end), self._deletions))

    def _take(self, run: m.Run, feeds: list[int]) -> None:
        taken = self._neighbours[self._host].take_all(run.session, [run.host_feeds + feed for feed in feeds])
        for _, done in taken.values():
            done()

    def _transmit(self, host: int, ordinal: int, nbytes: int, after: SimEvent) -> tuple[SimEvent, SimEvent]:
        """Return the departure and the arrival of a message that is sent after `after`."""
        model, clock = self._backend.model, self._backend.clock
        if host == self._host:
            return after, after
        near = host in self._neighbours
        link = self._ici[ordinal] if near else self._dcn
        departure = SimTask(clock, nbytes / (model.ici_bandwidth if near else model.dcn_bandwidth))
        if near:
            self._ici[ordinal] = departure
        else:
            self._dcn = departure
        departure.join((link, after))
        arrival = SimTask(clock, model.ici_latency if near else model.dcn_latency)
        arrival.join((departure,))
        return departure, arrival

    def _deliver_at(self, arrival: SimEvent, host: int, session: int, feed: int) -> None:
        arrival.when_over(partial(self._deliver, host, session, feed))

    def _deliver(self, host: int, session: int, feed: int) -> None:
        inbox = self._neighbours.get(host)
        if inbox is not None:
            inbox.put(session, feed, b"")
        else:
            send_to_host(self._port, self._host, host, session, feed, Buffers([memoryview(b"\0")]))
