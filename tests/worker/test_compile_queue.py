"""In which order a host compiles for its tenants."""

from __future__ import annotations

import pytest

from atoll.errors import StatusError
from atoll.worker import compile_queue
from atoll.worker.compile_queue import MAX_ASKING_PER_SESSION, CompileQueue

ANA, BEN = "ana", "ben"


class Host:
    """A queue with its clock, and the compilations that run."""

    def __init__(self, places: int = 2, limit: int = 4) -> None:
        self.queue = CompileQueue(places, limit)
        self.now = 0.0
        self.running: list[int] = []
        self._next = 0

    def add(
        self, tenant: str, count: int = 1, *, share: float = 1.0, session: int = 1, asks: bool = False
    ) -> list[int]:
        numbers = list(range(self._next, self._next + count))
        self._next += count
        for number in numbers:
            self.queue.add(number, tenant, share, session, asks)
        self.start()
        return numbers

    def start(self) -> None:
        self.running += self.queue.start(self.now)

    def end(self, number: int) -> float:
        self.running.remove(number)
        seconds = self.queue.end(number, self.now)
        self.start()
        return seconds


def test_a_tenant_alone_has_the_places_in_the_order_of_its_queue() -> None:
    host = Host()
    first, second, third = host.add(ANA, 3)
    assert host.running == [first, second]
    host.now = 3.0
    assert host.end(second) == 3.0
    assert host.running == [first, third]


def test_no_tenant_waits_for_the_long_compilations_of_another() -> None:
    host = Host()
    host.add(ANA, 5)
    (number,) = host.add(BEN)
    assert number in host.running
    host.add(BEN)
    assert len(host.running) == 3  # a second one waits for its turn


def test_there_are_so_many_spare_places_and_no_more() -> None:
    host = Host(places=2, limit=4)
    for tenant in "abcdef":
        host.add(tenant, 2)
    assert len(host.running) == 4


@pytest.mark.parametrize("share", [1.0, 3.0])
def test_places_go_by_shares(share: float) -> None:
    host = Host(places=1, limit=1)
    host.add(ANA, 400)
    own = host.add(BEN, 400, share=share)
    turns = []
    for _ in range(200):
        host.now += 1
        turns.append(host.running[0] in own)
        host.end(host.running[0])
    assert sum(turns) == pytest.approx(200 * share / (share + 1), abs=2)


def test_time_without_work_is_no_credit() -> None:
    host = Host(places=1, limit=1)
    host.add(ANA, 40)
    for _ in range(20):
        host.now += 1
        host.end(host.running[0])
    numbers = host.add(BEN, 40)
    turns = []
    for _ in range(10):
        host.now += 1
        turns.append(host.running[0] in numbers)
        host.end(host.running[0])
    assert 4 <= sum(turns) <= 6


def test_a_compilation_that_asks_its_client_occupies_no_place() -> None:
    host = Host(places=1, limit=1)
    (asking,) = host.add(ANA, asks=True)
    host.now = 1.0
    host.queue.ask(asking, host.now)
    (other,) = host.add(ANA)
    assert host.running == [asking, other]
    host.now = 11.0
    host.queue.answered(asking, host.now)
    host.now = 12.0
    assert host.end(asking) == 2.0  # without the 10 seconds of its client


def test_few_compilations_of_a_session_ask_at_a_time_and_the_others_pass_them() -> None:
    host = Host(places=20, limit=20)
    host.add(ANA, MAX_ASKING_PER_SESSION + 2, asks=True)
    assert len(host.running) == MAX_ASKING_PER_SESSION
    (other,) = host.add(ANA)
    assert other in host.running


def test_what_is_canceled_is_out_of_the_queue() -> None:
    host = Host(places=1, limit=1)
    first, second, third = host.add(ANA, 3)
    assert host.queue.end(second, 5.0) == 0.0
    assert host.queue.statistics() == {"queued": 1, "running": 1, "asking": 0}
    host.end(first)
    assert host.running == [third]
    host.end(third)
    assert host.queue.statistics() == {"queued": 0, "running": 0, "asking": 0}


def test_a_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "MAX_QUEUED", 3)
    host = Host(places=0, limit=0)
    host.add(ANA, 3)
    with pytest.raises(StatusError, match="3 programs of tenant ana wait to be compiled"):
        host.add(ANA)
    host.add(BEN)
