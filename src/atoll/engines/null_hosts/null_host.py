"""A host of null devices, and its network.

The host is a worker without its own threads, on an event loop or in a simulation. A transfer takes the time of the
model and carries no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from functools import partial
from typing import Any

from atoll.devices.device import DeviceArray
from atoll.devices.null.model import NullModel
from atoll.devices.null.null_backend import Collectives, NullArray, NullBackend, NullToken, bytes_of
from atoll.devices.null.sim_events import EventClock, SimEvent, SimTask, all_of
from atoll.host_services.profiles.profile_recorder import ProfileRecorder
from atoll.host_services.row_messages import SPAN_BYTES
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.transfers.piece_contents import BufferContents
from atoll.worker.completion_reporter import Occupancy
from atoll.worker.completions import ArrayCompletion, Completion, DeletionGuard, ReadCompletion, RunCompletion
from atoll.worker.delegated_run_dispatcher import DelegatedRunDispatcher, DelegatedUnits, UnitsEnded
from atoll.worker.dispatch_unit import DispatchUnit
from atoll.worker.executor_thread import Units
from atoll.worker.host_functions import HostFunctions
from atoll.worker.host_group import Ends, HostGroup, SendToHost
from atoll.worker.host_network import SendPort, send_to_host
from atoll.worker.message_handler import MessageHandler
from atoll.worker.plan_executor import PlanExecutor
from atoll.worker.read_threads import ReadThreads
from atoll.worker.spill_store import SpillStore
from atoll.worker.step_runner import StepRunner
from atoll.worker.store import TypeKeys


class AtOnce(Pool):
    """An executor without threads: `submit` makes the call before it returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class ClockWatcher:
    """A `Watcher` that reports the times of the model's clock.

    These do not depend on when this process runs. So duration estimates are based on the model, and delays of the
    process are charged to no session.
    """

    def __init__(self, clock: EventClock, report: Callable[..., None]) -> None:
        self._clock = clock
        self._report = report

    def watch(self, device: int, sequence: int, started: int, completions: Sequence[Completion]) -> None:
        if len(completions) == 1 and isinstance(completions[0], RunCompletion):  # nearly always
            token = completions[0].token
            assert isinstance(token, NullToken)
            token.moment.when_over(partial(self._report_end, sequence, started, token.moment))
            return
        left, last = len(completions), SimEvent(self._clock, 0.0)

        def over(moment: SimEvent | None = None) -> None:
            nonlocal left, last
            moment = moment or SimEvent(self._clock, self._clock.now())  # reads have no event
            last = max(last, moment, key=SimEvent.when)
            left -= 1
            if not left:
                self._report_end(sequence, started, last)

        for completion in completions:
            if isinstance(completion, RunCompletion):
                assert isinstance(completion.token, NullToken)
                completion.token.moment.when_over(partial(over, completion.token.moment))
            elif isinstance(completion, ArrayCompletion):
                assert isinstance(completion.array, NullArray)
                completion.array.moment.when_over(partial(over, completion.array.moment))
            else:
                assert isinstance(completion, ReadCompletion)
                completion.when_done(lambda: self._clock.call_at(0.0, over))

    def _report_end(self, sequence: int, started: int, moment: SimEvent) -> None:
        self._report(m.Done(((sequence, started, int(1e9 * moment.when())),)))


class NullHost:
    """The worker of a host of null devices.

    Args:
        neighbors: The inboxes of the island's hosts, by host number. The inbox of this host is added.
        make_port: Makes the data port from the inbox.
        report: Sends messages to the controller, from any thread.
        call_soon: Schedules a call on the thread of `handle`, from any thread.
        send: Sends to another host of the group; see `HostGroup`.
        process: The relay of this process, if it has one.
        dispatch_soon: Schedules the start of the next segment of a delegated run; `call_soon` by default.
    """

    def __init__(
        self,
        host: int,
        rank: int,
        devices: int,
        *,
        model: NullModel,
        clock: EventClock,
        collectives: Collectives,
        neighbors: MutableMapping[int, Inbox],
        make_port: Callable[[Inbox], Any],
        report: Callable[..., None],
        renew: Callable[[float], None],
        call_soon: Callable[[Callable[[], None]], None],
        read_threads: ReadThreads,
        send: SendToHost,
        dispatch_soon: Callable[[Callable[[], None]], None] | None = None,
        process: Ends | None = None,
    ) -> None:
        self.group = HostGroup(host, self._handle, send, report, process)
        report = self.group.report

        def now() -> int:
            return int(1e9 * clock.now())

        self.backend = NullBackend(rank, devices, model, clock, collectives)
        keys = TypeKeys()
        inbox = neighbors[host] = Inbox(lambda session, feed: report(m.FeedsArrived(session, (feed,))))
        self.port = make_port(inbox)
        functions = HostFunctions(self.backend, inbox, keys, report=report, pool=AtOnce())
        soon = dispatch_soon or call_soon
        delegated = DelegatedUnits(report, lambda ended: soon(partial(self._units_ended, ended)))
        self.network = NullNetwork(self.backend, self.port, host, neighbors)
        steps = StepRunner(self.backend, functions, self.port, self.network, keys, report, lambda outcome: None)
        spill_store = SpillStore(self.backend, inbox, self.port, host, steps.holds, report, read_threads.of(0))
        occupancy = Occupancy(delegated.report, steps.devices_of, steps.shards_of)
        self._executor = PlanExecutor(
            steps,
            inbox,
            occupancy,
            ClockWatcher(clock, occupancy.report),
            read_threads,
            lambda: call_soon(self._resume_blocked),
            spill_store,
            now,
        )
        self._dispatcher = DelegatedRunDispatcher(delegated, self._executor.handle, inbox.await_all, now)
        self._reporter = self._executor.reporter
        recorder = ProfileRecorder(self.backend.begin_profile, functions.programs.others, None, host)
        self._handler = MessageHandler(
            self.backend,
            functions=functions,
            data_port=self.port,
            execute=self._dispatcher.handle,
            renew=renew,
            units=Units(self._executor, occupancy, delegated, steps.joint_runs),
            report=report,
            recorder=recorder,
            spill_store=spill_store,
            host=host,
            now=now,
        )

    def handle(self, message: Any) -> bool:
        """Handle a message of the controller. Return whether more messages may follow."""
        return self.group.take(message)

    def _handle(self, message: Any) -> bool:
        continues = self._handler.handle(message)
        if self._reporter.completed:
            self._reporter.report_completed()
        return continues

    def _units_ended(self, ended: UnitsEnded) -> None:
        self._dispatcher.handle(ended)
        self._reporter.report_completed()

    def _resume_blocked(self) -> None:
        self._executor.resume_blocked()
        self._reporter.report_completed()


class NullNetwork:
    """The `HostNetwork` of host number `host`, with the links of the model.

    `neighbors` are the inboxes of all the island's hosts, by host number; they are in this process. Messages to other
    hosts use the port. `sent_bytes` counts the bytes to hosts of other islands.
    """

    def __init__(self, backend: NullBackend, port: SendPort, host: int, neighbors: Mapping[int, Inbox]) -> None:
        self._backend = backend
        self._port = port
        self._host = host
        self._neighbors = neighbors
        self._ici: list[SimEvent] = [SimEvent(backend.clock, 0.0)] * len(backend.lines)
        self._dcn = SimEvent(backend.clock, 0.0)
        self.sent_bytes = 0
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
        taken = self._neighbors[self._host].take_all(run.session, [run.host_feeds + feed for feed in feeds])
        for _, done in taken.values():
            done()

    def _transmit(self, host: int, ordinal: int, nbytes: int, after: SimEvent) -> tuple[SimEvent, SimEvent]:
        """Return the departure and the arrival of a message that is sent after `after`."""
        model, clock = self._backend.model, self._backend.clock
        if host == self._host:
            return after, after
        near = host in self._neighbors
        link = self._ici[ordinal] if near else self._dcn
        departure = SimTask(clock, nbytes / (model.ici_bandwidth if near else model.dcn_bandwidth))
        if near:
            self._ici[ordinal] = departure
        else:
            self._dcn = departure
            self.sent_bytes += nbytes
        departure.join((link, after))
        arrival = SimTask(clock, model.ici_latency if near else model.dcn_latency)
        arrival.join((departure,))
        return departure, arrival

    def _deliver_at(self, arrival: SimEvent, host: int, session: int, feed: int) -> None:
        arrival.when_over(partial(self._deliver, host, session, feed))

    def _deliver(self, host: int, session: int, feed: int) -> None:
        inbox = self._neighbors.get(host)
        if inbox is not None:
            inbox.put(session, feed, b"")
        else:
            send_to_host(self._port, self._host, host, session, feed, BufferContents([memoryview(b"\0")]))
