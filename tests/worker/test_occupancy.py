"""Which units keep devices busy: the first on their devices, and none that waits for something else."""

from __future__ import annotations

from typing import Any

from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.worker.completions import DeletionGuard, RunCompletion
from atoll.worker.occupancy import Occupancy


class Output:
    """An output whose readiness the test sets."""

    def __init__(self) -> None:
        self.ready = False

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return self.ready


class Host:
    """Runs by unit, and the devices of what the executor's thread enqueues."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.enqueuing: tuple[int, ...] = ()
        self.occupancy = Occupancy(lambda *messages: self.reports.extend(messages), lambda unit: self.enqueuing)

    def begin(self, sequence: int, *devices: int) -> Output:
        output, token = Output(), None
        completion: Any = RunCompletion(token, [output], DeletionGuard(), devices)
        self.occupancy.begun(sequence, [completion] if devices else [])
        return output

    def running(self) -> list[int]:
        return self.occupancy.running()


def test_the_first_unit_on_its_devices_keeps_them_busy():
    host = Host()
    first = host.begin(1, 0)
    host.begin(2, 0)
    host.begin(3, 1)
    assert host.running() == [1, 3]
    first.ready = True
    assert host.running() == [2, 3], "what is left of it, such as a read, keeps no device busy"


def test_a_unit_behind_one_that_waits_is_not_running():
    host = Host()
    host.begin(1, 0)
    host.begin(2, 0, 1)
    host.begin(3, 1)
    assert host.running() == [1]


def test_runs_on_several_devices_are_done_one_at_a_time():
    host = Host()
    host.begin(1, 0, 1)
    host.begin(2, 2, 3)
    assert host.running() == [1]


def test_a_unit_that_runs_nothing_on_devices_is_not_running():
    host = Host()
    host.begin(1)
    host.begin(2, 0)
    assert host.running() == [2]


def test_a_unit_that_has_ended_is_not_running():
    host = Host()
    host.begin(1, 0)
    host.begin(2, 1)
    done, failed = m.Done(((1, 0, 1),)), m.Failed(2, Status(Code.CANCELLED, "stopped"))
    host.occupancy.report(done, failed)
    assert host.reports == [done, failed]
    assert host.running() == []


def test_a_unit_inside_the_call_that_enqueues_it_is_running_unless_another_is_before_it():
    host = Host()
    unit: Any = type("Unit", (), {"sequence": 9})
    host.occupancy.executing, host.enqueuing = unit, (0,)
    assert host.running() == [9]
    host.begin(1, 0, 1)
    assert host.running() == [1]
    host.occupancy.executing = None
    assert host.running() == [1]
