"""One host of null devices: a worker without threads of its own, on an event loop or in a simulation."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from typing import Any

from atoll.protocol import messages as m
from atoll.transfers.inbox import Inbox
from atoll.worker.conversation import Conversation
from atoll.worker.ends import ArrayEnd, ReadEnd, RunEnd, Wait
from atoll.worker.functions import Functions
from atoll.worker.null.backend import Collectives, NullBackend
from atoll.worker.null.model import NullModel
from atoll.worker.null.moments import Clock
from atoll.worker.null.steps import NullSteps
from atoll.worker.store import TypeKeys
from atoll.worker.walks import PlanExecutor


class AtOnce(Pool):
    """A pool of no threads: what is submitted is done before `submit` returns."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class NullEnds:
    """Ends, told by the clock: see `worker.ends.Ends`. Times are the model's, so that durations are learnt from it."""

    def __init__(self, clock: Clock, report: Callable[..., None]) -> None:
        self._clock = clock
        self._report = report

    def expect(self, device: int, sequence: int, started: int, waits: Sequence[Wait]) -> None:
        left = len(waits)

        def over() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._report(m.Done(((sequence, started, int(1e9 * self._clock.now())),)))

        for wait in waits:
            if isinstance(wait, RunEnd):
                wait.token.moment.when_over(over)
            elif isinstance(wait, ArrayEnd):
                wait.array.moment.when_over(over)
            else:
                assert isinstance(wait, ReadEnd)
                wait.when_done(lambda: self._clock.call_at(0.0, over))


class NullHost:
    """`hear` takes the controller's messages; `report` sends answers, from any thread.

    `neighbours` are the inboxes of the island's hosts: this one's is added. `make_port(inbox)` gives the data port.
    `call_soon` has something done on the thread of `hear`, from any other.
    """

    def __init__(
        self,
        host: int,
        rank: int,
        devices: int,
        model: NullModel,
        clock: Clock,
        collectives: Collectives,
        neighbours: MutableMapping[int, Inbox],
        make_port: Callable[[Inbox], Any],
        report: Callable[..., None],
        renew: Callable[[float], None],
        call_soon: Callable[[Callable[[], None]], None],
        readers: Pool,
    ) -> None:
        self.backend = NullBackend(rank, devices, model, clock, collectives)
        keys = TypeKeys()
        inbox = neighbours[host] = Inbox(lambda session, feed: report(m.FeedsArrived(session, (feed,))))
        self.port = make_port(inbox)
        backend: Any = self.backend
        functions = Functions(backend, inbox, keys, report, AtOnce())
        steps = NullSteps(self.backend, functions, self.port, keys, host, neighbours)
        self.walks = PlanExecutor(
            steps,
            inbox,
            report,
            NullEnds(clock, report),
            readers,
            lambda: call_soon(self._go_on),
            lambda: int(1e9 * clock.now()),
        )
        self._conversation = Conversation(backend, functions, self.port, self.walks.hear, renew, report)

    def hear(self, message: Any) -> bool:
        """As `Conversation.hear`."""
        goes_on = self._conversation.hear(message)
        self.walks.tell_ended()
        return goes_on

    def _go_on(self) -> None:
        self.walks.go_on()
        self.walks.tell_ended()
