"""Tests of donation and deletion while other users read or share the memory."""

from __future__ import annotations

import socket

import pytest

from atoll.errors import Code
from atoll.ir import plan as p
from atoll.protocol import messages as m
from tests.worker.worker_rig import LARGE, SECONDS, Behaviours, Rig, add, local, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_donation")


@BEHAVIOURS.add
def it_refuses_a_deleted_array(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices)
        a = rig.ones(*devices)
        rig.executor.submit(m.Free(rig.session, (a,), True))
        says(rig.failure(rig.call(name, a, rig.ones(*devices))), Code.INVALID_ARGUMENT, "deleted or donated")


@BEHAVIOURS.add
def it_refuses_a_donated_array(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices, donate=(0,))
        a = rig.ones(*devices)
        report, _ = rig.call(name, a, rig.ones(*devices), donated=(0,))
        assert isinstance(report, m.Done), report
        says(rig.failure(rig.call(name, rig.ones(*devices), a)), Code.INVALID_ARGUMENT, "deleted or donated")
        move = p.Move((0,), (1,), (local(*devices),), False)
        says(rig.failure(rig.run([move], [a])), Code.INVALID_ARGUMENT, "deleted or donated")
        says(rig.failure(rig.run([p.Select((0,), 1, local(0), (p.Take(0, 0),), False)], [a])), Code.INVALID_ARGUMENT)


@BEHAVIOURS.add
def it_refuses_to_donate_an_array_that_is_passed_twice(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        name = rig.function(add, spec(), spec(), devices=devices, donate=(0,))
        a = rig.ones(*devices)
        says(rig.failure(rig.call(name, a, a, donated=(0,))), Code.INVALID_ARGUMENT, "argument 0 is donated")
        assert rig.shard(a).tolist() == [1, 1, 1, 1]


@BEHAVIOURS.add
def it_refuses_to_donate_an_array_that_is_passed_again_under_another_name(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), donate=(0,))
    pair = rig.ones(0, 1)
    take = p.Select((0,), 1, local(0), (p.Take(0, 0),), False)
    _, (first,) = rig.run([take], [pair])
    _, (again,) = rig.run([take], [pair])
    report, _ = rig.call(name, first, again, donated=(0,))
    # XLA may notice or not; what counts is that the process lives and the answer is right.
    assert isinstance(report, m.Done | m.Failed)


@BEHAVIOURS.add
def it_copies_a_donated_input_that_the_caller_keeps(rig: Rig) -> None:
    name = rig.function(add, spec(), spec(), devices=(0, 1), donate=(0,))
    a = rig.ones(0, 1)
    report, (result,) = rig.call(name, a, rig.ones(0, 1), preserved=(0,))
    assert isinstance(report, m.Done), report
    assert rig.shard(result).tolist() == [2, 2, 2, 2]
    assert rig.shard(a).tolist() == [1, 1, 1, 1]


def read_pending(rig: Rig, handle: int) -> None:
    """Start reading an array of LARGE elements. The read cannot end, because no proxy has opened its channel yet."""
    get = p.Get(0, 1, 0, (LARGE,), None, (0,), (((0, LARGE),),))
    rig.start([get], [handle], 1, [rig.fresh()], name="get")


def contents_of_pending_read(rig: Rig) -> set[float]:
    """Let the read end, and return the contents."""
    got = set(rig.next_piece(rig.proxy()).tolist())
    report = rig.reports.get(timeout=SECONDS)
    assert isinstance(report, m.Done), report
    return got


@BEHAVIOURS.add
def it_copies_what_is_donated_while_it_is_read(rig: Rig) -> None:
    for devices in ((0,), (0, 1)):
        rig.open_session()
        name = rig.function(add, spec((LARGE,)), spec((LARGE,)), devices=devices, donate=(0,))
        a, b = rig.ones(*devices, shape=(LARGE,)), rig.ones(*devices, shape=(LARGE,))
        read_pending(rig, a)
        report, (result,) = rig.call(name, a, b, donated=(0,))
        assert isinstance(report, m.Done), report
        assert set(rig.shard(result).tolist()) == {2}
        assert contents_of_pending_read(rig) == {1}


@BEHAVIOURS.add
def it_copies_what_is_moved_away_while_it_is_read(rig: Rig) -> None:
    a = rig.ones(0, shape=(LARGE,))
    read_pending(rig, a)
    report, _ = rig.run([p.Move((0,), (1,), (local(1, shape=(LARGE,)),), True)], [a])
    assert isinstance(report, m.Done), report
    assert contents_of_pending_read(rig) == {1}


@BEHAVIOURS.add
def it_deletes_after_reading(rig: Rig) -> None:
    a = rig.ones(0, shape=(LARGE,))
    read_pending(rig, a)
    rig.executor.submit(m.Free(rig.session, (a,), True))
    rig.executor.submit(m.Free(rig.session, (a,)))
    assert contents_of_pending_read(rig) == {1}


@BEHAVIOURS.add
def it_copies_what_is_donated_while_a_part_of_it_is_read(rig: Rig) -> None:
    name = rig.function(add, spec((LARGE,)), spec((LARGE,)), devices=(0, 1), donate=(0,))
    a, b = rig.ones(0, 1, shape=(LARGE,)), rig.ones(0, 1, shape=(LARGE,))
    take = p.Select((0,), 1, local(0, shape=(LARGE,)), (p.Take(0, 0),), False)
    _, (part,) = rig.run([take], [a])
    read_pending(rig, part)
    report, _ = rig.call(name, a, b, donated=(0,))
    assert isinstance(report, m.Done), report
    assert contents_of_pending_read(rig) == {1}


@BEHAVIOURS.add
def it_deletes_after_a_part_has_been_read(rig: Rig) -> None:
    a = rig.ones(0, 1, shape=(LARGE,))
    take = p.Select((0,), 1, local(0, shape=(LARGE,)), (p.Take(0, 0),), False)
    _, (part,) = rig.run([take], [a])
    read_pending(rig, part)
    rig.executor.submit(m.Free(rig.session, (a,), True))
    assert contents_of_pending_read(rig) == {1}


@BEHAVIOURS.add
def it_fails_a_read_whose_session_has_ended(rig: Rig) -> None:
    read_pending(rig, rig.ones(0, shape=(LARGE,)))
    rig.port.close_session(rig.session)
    with socket.socket(socket.AF_UNIX) as knock:  # who waits for a channel looks again when one opens
        knock.connect(rig.port.address.path)
    rig.port.open_session(rig.fresh(), "another")
    report = rig.reports.get(timeout=SECONDS)
    assert isinstance(report, m.Failed)
    says(report.status, Code.CANCELLED, "has ended")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return BEHAVIOURS.outcomes()


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_donation_and_deletion(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    BEHAVIOURS.play()
