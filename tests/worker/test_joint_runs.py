"""A run together with other hosts starts after the former one has succeeded, or if it needs a result of that one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from atoll.worker.completions import DeletionGuard
from atoll.worker.joint_runs import JointRun, JointRuns, RunState
from atoll.worker.store import COMPUTED, Buffer

SECONDS = 10.0
DEVICES = (0, 1)


class Token:
    """The completion of a run, which a test ends."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()
        self.error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.has_ended.set()

    def block_until_ready(self) -> None:
        assert self.has_ended.wait(SECONDS)
        if self.error is not None:
            raise self.error


class Shard(Token):
    """An output on one device."""

    def is_ready(self) -> bool:
        return self.has_ended.is_set()


class Output:
    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.deleted = False

    def is_deleted(self) -> bool:
        return self.deleted


class Rig:
    """Joint runs of a host."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.tokens: list[Token] = []
        self.pool = ThreadPoolExecutor(2)
        self.guard = DeletionGuard()
        self.runs = JointRuns(self.pool, lambda array: array.shards, self.guard)

    def start(self, sequence: int, world: int = 0, devices: tuple[int, ...] = DEVICES) -> tuple[JointRun, Token]:
        token = Token()
        self.tokens.append(token)
        output: Any = Output([Shard() for _ in devices])
        return self.runs.start(world, sequence, devices, token, [output]), token

    def awaits(self, *inputs: Buffer, world: int = 0, devices: tuple[int, ...] = DEVICES) -> bool:
        return self.runs.awaits(world, devices, inputs, self.woken.set)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for token in rig.tokens:
        token.end()
    rig.pool.shutdown()


def result_of(run: JointRun) -> Buffer:
    return Buffer(None, 0, COMPUTED, None, run)


class Succeeds(JointRun):
    """A run that succeeds after its state has been read for the first time."""

    reads = 0

    @property
    def state(self) -> RunState:
        self.reads += 1
        return RunState.RUNNING if self.reads == 1 else RunState.SUCCEEDED

    @state.setter
    def state(self, state: RunState) -> None:
        """Ignore the states of a real run."""


def test_a_run_that_waits_is_woken_even_if_the_former_one_succeeds_meanwhile(rig: Rig) -> None:
    run, token = rig.start(1)
    token.end()
    run.__class__ = Succeeds
    assert rig.awaits()
    assert rig.woken.wait(SECONDS)
    assert not rig.awaits()


def test_a_run_waits_until_the_former_one_has_succeeded(rig: Rig) -> None:
    assert not rig.awaits()
    _, token = rig.start(1)
    assert rig.awaits()
    token.end()
    assert rig.woken.wait(SECONDS)
    assert not rig.awaits()


def test_a_run_does_not_wait_if_the_watcher_knows_that_the_former_one_has_succeeded(rig: Rig) -> None:
    run, token = rig.start(1)
    token.end()
    run.block_until_ready()
    assert not rig.awaits()


def test_a_run_that_needs_a_result_of_the_former_one_does_not_wait(rig: Rig) -> None:
    run, _ = rig.start(1)
    assert not rig.awaits(result_of(run))
    assert rig.awaits(result_of(run), devices=(0, 1, 2)), "device 2 has no result to wait for"


def test_a_run_that_needs_only_an_earlier_result_waits(rig: Rig) -> None:
    first, _ = rig.start(1)
    rig.start(2)
    assert rig.awaits(result_of(first))


def test_after_a_failure_runs_wait_until_the_failed_one_has_ended_on_all_hosts(rig: Rig) -> None:
    run, token = rig.start(1)
    token.end(RuntimeError("broken"))
    assert rig.awaits()
    assert rig.woken.wait(SECONDS)
    assert run.state is RunState.FAILED
    assert rig.awaits()
    assert not rig.runs.ended(2)
    assert rig.awaits()
    assert rig.runs.ended(1)
    assert not rig.awaits()


def test_runs_of_other_worlds_do_not_wait(rig: Rig) -> None:
    rig.start(1, world=3)
    assert not rig.awaits()
    assert rig.awaits(world=3)


@pytest.mark.parametrize("fails", [True, False])
def test_runs_of_a_new_world_wait_for_a_run_that_others_may_begin_there(rig: Rig, fails: bool) -> None:
    _, token = rig.start(5, world=3)
    if fails:  # because the world is closed
        token.end(RuntimeError("broken"))
    rig.runs.closed(3, 4, ended=(4,))
    assert rig.awaits(world=4)
    if not fails:
        token.end(RuntimeError("broken"))
    assert rig.woken.wait(SECONDS)
    assert rig.awaits(world=4), "other hosts may have begun it in the new world"
    assert rig.runs.ended(5)
    assert not rig.awaits(world=4)


@pytest.mark.parametrize(("successor", "ended"), [(4, (5,)), (0, ())], ids=["no host begins it", "no new world"])
def test_runs_of_a_new_world_do_not_wait_for_a_run_that_ended_with_the_closed_one(
    rig: Rig, successor: int, ended: tuple[int, ...]
) -> None:
    rig.start(5, world=3)
    rig.runs.closed(3, successor, ended)
    assert not rig.awaits(world=4)


def test_runs_of_a_new_world_do_not_wait_for_a_run_that_had_succeeded(rig: Rig) -> None:
    run, token = rig.start(5, world=3)
    token.end()
    run.block_until_ready()
    rig.runs.closed(3, 4, ended=())
    assert not rig.awaits(world=4)


def fail_on_a_device(run: JointRun) -> None:
    output: Any = run.output
    output.shards[1].end(RuntimeError("broken"))


def test_a_failure_on_one_device_is_found_while_the_other_devices_wait(rig: Rig) -> None:
    rig.start(1)
    run, _ = rig.start(2)
    rig.start(3, world=3)
    fail_on_a_device(run)
    assert rig.runs.failed_on_devices() == [], "it may end soon"
    ((sequence, status),) = rig.runs.failed_on_devices()
    assert sequence == 2
    assert "broken" in status.message
    assert rig.runs.failed_on_devices() == []


def test_a_run_that_waits_while_it_consumes_arrays_delays_no_answer_to_a_ping(rig: Rig) -> None:
    run, _ = rig.start(1)
    fail_on_a_device(run)
    rig.runs.failed_on_devices()
    with rig.guard.lock:  # by the executor's thread
        assert rig.pool.submit(rig.runs.failed_on_devices).result(SECONDS) == []
    ((sequence, _),) = rig.runs.failed_on_devices()
    assert sequence == 1


def test_only_runs_that_may_be_running_are_examined(rig: Rig) -> None:
    first, _ = rig.start(1)
    last, token = rig.start(2)
    fail_on_a_device(first)
    token.end()
    last.block_until_ready()
    rig.runs.failed_on_devices()
    assert rig.runs.failed_on_devices() == []


def test_an_output_that_was_deleted_is_not_examined(rig: Rig) -> None:
    run, _ = rig.start(1)
    fail_on_a_device(run)
    output: Any = run.output
    output.deleted = True
    rig.runs.failed_on_devices()
    assert rig.runs.failed_on_devices() == []


def test_a_run_that_has_ended_keeps_no_output(rig: Rig) -> None:
    run, token = rig.start(1)
    token.end(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        run.block_until_ready()
    assert run.output is None


def test_a_run_that_has_ended_keeps_no_earlier_runs(rig: Rig) -> None:
    first, _ = rig.start(1)
    second, token = rig.start(2)
    third, _ = rig.start(3)
    assert third.unended() == [first, second, third]
    token.end()
    second.block_until_ready()
    assert third.unended() == [third]
    assert second.former is None
    assert first.output is None, "it has ended before, although no thread has waited for it"


def test_a_run_that_has_failed_on_a_device_is_reported_once(rig: Rig) -> None:
    run, _ = rig.start(1)
    fail_on_a_device(run)
    reports = [rig.runs.failed_on_devices() for _ in range(2)]
    assert [len(each) for each in reports] == [0, 1]
    later, _ = rig.start(2)
    fail_on_a_device(later)
    assert rig.runs.failed_on_devices() == []
    ((sequence, _),) = rig.runs.failed_on_devices()
    assert sequence == 2
