"""Completed units are reported, even while the executor's thread is inside a unit that lasts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from atoll.errors import StatusError
from atoll.host_services.calls.call_messages import ReadWanted
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.protocol.number_ranges import SCRIPT_FEEDS
from atoll.worker.message_handler import MessageHandler
from tests.waiting import until
from tests.worker.worker_rig import SECONDS, Behaviours, Rig, add, local, spec

DATA = bytes(range(16))
BEHAVIOURS = Behaviours("tests.worker.test_executor_thread")


class Holding:
    """Calls of Python that block the executor's thread until the test ends them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.begun: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        rig.executor.plan_executor._steps._python = self
        nothing: Any = None
        self.handler = MessageHandler(
            backend=nothing,
            functions=rig.functions,
            data_port=nothing,
            execute=rig.executor.submit,
            renew=lambda seconds: None,
            units=rig.executor.units,
            report=rig.report,
            recorder=nothing,
            spill_store=nothing,
            host=0,
        )

    def call(
        self,
        function: str,
        stream: int,
        inputs: Any,
        results: Any,
        on_outcome: Callable[[Any], None],
        sequence: int,
    ) -> None:
        let_go = threading.Event()
        self.begun.put(let_go)
        assert let_go.wait(SECONDS)
        on_outcome([])

    def start(self) -> None:
        self.rig.start([p.Python("f", 0, (), (), -1)], (), 0)

    def next(self) -> threading.Event:
        """Wait until the next call has begun."""
        return self.begun.get(timeout=SECONDS)

    def ended(self) -> int:
        """Return how many units the next report is about."""
        report = self.rig.reports.get(timeout=SECONDS)
        assert isinstance(report, m.Done), report
        return len(report.runs)


@BEHAVIOURS.add
def it_reports_what_is_complete_at_a_ping_while_the_next_unit_lasts(rig: Rig) -> None:
    name, argument = rig.function(add, spec(), spec()), rig.ones()
    holding = Holding(rig)
    holding.start()
    first = holding.next()
    for _ in range(2):
        rig.start([p.Execute(name, (0, 0), 1, (), (), False)], [argument])
    holding.start()
    first.set()
    second = holding.next()
    holding.handler.handle(m.Ping(10.0, 1.0))
    assert holding.ended() == 2
    assert isinstance(rig.reports.get(timeout=SECONDS), m.Pong)
    second.set()
    assert holding.ended() >= 1


def read(rig: Rig, handle: int) -> bool:
    return rig.executor.read(rig.session, ReadWanted(SCRIPT_FEEDS.start, handle), lambda: None)


@BEHAVIOURS.add
def it_sends_an_array_that_is_ready_at_once(rig: Rig) -> None:
    (handle,) = rig.run([p.Put(0, local(0), (p.HostPiece(0, 0, (4,), None, None),))], feeds=[rig.feed(DATA)])[1]
    client = rig.proxy()
    until(lambda: rig.port.to_proxy_nowait(rig.session) is not None)
    until(lambda: read(rig, handle))  # the thread is idle
    assert rig.next_piece(client).tobytes() == DATA


@BEHAVIOURS.add
def it_sends_no_array_while_the_thread_is_inside_a_unit(rig: Rig) -> None:
    handle, client = rig.ones(), rig.proxy()
    until(lambda: read(rig, handle))
    holding = Holding(rig)
    holding.start()
    event = holding.next()
    assert not read(rig, handle)
    event.set()
    assert holding.ended() == 1
    until(lambda: read(rig, handle))
    client.close()


@BEHAVIOURS.add
def it_sends_no_array_to_a_session_without_a_channel_and_none_that_is_large(rig: Rig) -> None:
    handle, large = rig.ones(), rig.ones(shape=(1 << 16,))
    assert not any([read(rig, handle) for _ in range(100)])
    client = rig.proxy()
    until(lambda: read(rig, handle))
    assert not any([read(rig, large) for _ in range(100)])
    client.close()


@BEHAVIOURS.add
def it_sends_no_array_of_another_session_and_none_that_was_deleted_or_donated(rig: Rig) -> None:
    foreign = rig.ones()
    rig.open_session()
    client = rig.proxy()
    deleted, donated, name = rig.ones(), rig.ones(), rig.function(add, spec(), spec(), donate=(0,))
    rig.executor.submit(m.Free(rig.session, (deleted,), delete=True))
    rig.call(name, donated, rig.ones(), donated=(0,))
    kept = rig.ones()
    until(lambda: read(rig, kept))
    for handle, text in ((foreign, "is not on this host"), (deleted, "deleted or donated"), (donated, "deleted or")):
        with pytest.raises(StatusError, match=text):
            until(lambda handle=handle: read(rig, handle))
    client.close()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return BEHAVIOURS.outcomes()


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_the_executor_thread(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    BEHAVIOURS.play()
