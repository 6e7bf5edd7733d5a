"""Functions of worlds on one host: arrays of other clients, and worlds that are closed and replaced."""

from __future__ import annotations

import select
import socket
import threading
import time

import pytest

from atoll.errors import Code, Status, StatusError
from atoll.ir import plan as p
from atoll.protocol import messages as m
from atoll.worker.host_worlds import HostWorlds
from tests.worker.worker_rig import SECONDS, Behaviours, Rig, add, local, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_host_worlds")
CLOSED = Status(Code.DATA_LOSS, "host 1 is gone")


def joined(rig: Rig) -> int:
    """Have the rig's host serve and join a world without other hosts. Return its number."""
    world = rig.fresh()
    rig.worlds.join(m.JoinWorld(world, 0, 1))
    served = rig.reports.get(timeout=SECONDS)
    assert isinstance(served, m.WorldServed), served
    return world


@BEHAVIOURS.add
def it_passes_arrays_between_a_world_and_the_host(rig: Rig) -> None:
    together = rig.function(add, spec(), spec(), devices=(0, 1), world=joined(rig))
    alone = rig.function(add, spec(), spec(), devices=(0, 1))
    a, b = rig.ones(0, 1), rig.ones(0, 1)
    _, (two,) = rig.call(together, a, b)
    _, (three,) = rig.call(alone, two, a)
    _, (five,) = rig.call(together, two, three)
    assert [rig.shard(each, 1).tolist() for each in (two, three, five)] == [[2.0] * 4, [3.0] * 4, [5.0] * 4]
    assert rig.shard(a).tolist() == [1, 1, 1, 1]


@BEHAVIOURS.add
def it_donates_an_array_of_the_host_to_a_world(rig: Rig) -> None:
    together = rig.function(add, spec(), spec(), devices=(0, 1), donate=(0,), world=joined(rig))
    a, b = rig.ones(0, 1), rig.ones(0, 1)
    report, (result,) = rig.call(together, a, b, donated=(0,))
    assert isinstance(report, m.Done), report
    assert rig.shard(result).tolist() == [2, 2, 2, 2]
    says(rig.failure(rig.call(together, a, b, donated=(0,))), Code.INVALID_ARGUMENT, "deleted or donated")
    assert rig.shard(b).tolist() == [1, 1, 1, 1]


@BEHAVIOURS.add
def it_moves_and_selects_shards_of_a_world(rig: Rig) -> None:
    together = rig.function(add, spec(), spec(), devices=(0, 1), world=joined(rig))
    a = rig.ones(0, 1)
    _, (two,) = rig.call(together, a, a)
    _, (taken,) = rig.run([p.Select((0,), 1, local(1), (p.Take(0, 1),), False)], [two])
    _, (moved,) = rig.run([p.Move((0,), (1,), (local(2),), False)], [taken])
    _, (mixed,) = rig.run([p.Select((0, 1), 2, local(0, 1), (p.Take(0, 0), p.Take(1, 1)), False)], [a, two])
    assert [rig.shard(each).tolist() for each in (taken, moved)] == [[2.0] * 4, [2.0] * 4]
    assert [rig.shard(mixed, each).tolist() for each in (0, 1)] == [[1.0] * 4, [2.0] * 4]


@BEHAVIOURS.add
def it_waits_for_arguments_that_are_computed_elsewhere(rig: Rig) -> None:
    """A later run of the session stays behind it, and the result is right."""
    import jax

    slow = rig.function(lambda x: jax.lax.fori_loop(0, 300_000, lambda _, y: y * 1.0, x) + 1, spec(), devices=(0,))
    together = rig.function(lambda x: x * 2, spec(), devices=(0,), world=joined(rig))
    a = rig.ones()
    execute = p.Execute(slow, (0,), 1, (), (), False)
    (computed,) = rig.start([execute], [a])
    (doubled,) = rig.start([p.Execute(together, (0,), 1, (), (), False)], [computed])
    ended = 0
    while ended < 2:  # one report may be of both
        report = rig.reports.get(timeout=SECONDS)
        assert isinstance(report, m.Done), report
        ended += len(report.runs)
    assert rig.shard(doubled).tolist() == [4, 4, 4, 4]


@BEHAVIOURS.add
def it_drops_the_functions_of_a_closed_world_and_keeps_its_arrays(rig: Rig) -> None:
    world = joined(rig)
    together = rig.function(add, spec(), spec(), devices=(0, 1), world=world)
    a = rig.ones(0, 1)
    _, (two,) = rig.call(together, a, a)
    rig.functions.close_world(m.CloseWorld(world, CLOSED))
    says(rig.failure(rig.call(together, a, a)), Code.NOT_FOUND)
    alone = rig.function(add, spec(), spec(), devices=(0, 1))
    _, (three,) = rig.call(alone, two, a)
    assert rig.shard(three).tolist() == [3, 3, 3, 3]
    again = rig.function(add, spec(), spec(), devices=(0, 1), world=joined(rig))
    _, (four,) = rig.call(again, two, two)
    assert rig.shard(four, 1).tolist() == [4, 4, 4, 4]


@BEHAVIOURS.add
def it_has_runs_wait_for_functions_that_move_to_another_world(rig: Rig) -> None:
    world = joined(rig)
    together = rig.function(add, spec(), spec(), devices=(0, 1), world=world)
    a = rig.ones(0, 1)
    successor = rig.fresh()
    rig.functions.close_world(m.CloseWorld(world, CLOSED, successor))
    (two,) = rig.start([p.Execute(together, (0, 1), 2, (), (), False)], [a, a])
    rig.worlds.join(m.JoinWorld(successor, 0, 1))
    reports = [rig.reports.get(timeout=SECONDS) for _ in range(3)]
    assert {type(each) for each in reports} == {m.WorldServed, m.Compiled, m.Done}, reports
    assert rig.shard(two).tolist() == [2, 2, 2, 2]


@BEHAVIOURS.add
def it_fails_functions_that_wait_for_a_world_which_is_closed(rig: Rig) -> None:
    world = rig.fresh()
    module = rig.lower(add, spec(), spec(), devices=(0, 1))
    closing = threading.Timer(0.2, rig.functions.close_world, (m.CloseWorld(world, CLOSED),))
    closing.start()
    _, status = rig.compile(module, (0, 1), world)
    says(status, Code.DATA_LOSS, "host 1 is gone")


@BEHAVIOURS.add
def it_reports_that_it_cannot_join(rig: Rig) -> None:
    world = rig.fresh()
    rig.worlds.join(m.JoinWorld(world, 1, 2, "unix:/nowhere", (0, 1)))
    reported = rig.reports.get(timeout=SECONDS)
    assert isinstance(reported, m.WorldFailed), reported
    assert reported.world == world
    _, status = rig.compile(rig.lower(add, spec(), spec(), devices=(0, 1)), (0, 1), world)
    says(status, Code.UNAVAILABLE, "cannot join the hosts of islands 0, 1")


@BEHAVIOURS.add
def it_reports_that_it_cannot_serve(rig: Rig) -> None:
    world = rig.fresh()
    worlds = HostWorlds(rig.backend.worlds, rig.report, lambda world: "unix:/nowhere/service", "127.0.0.1")
    worlds.join(m.JoinWorld(world, 0, 2, "", (0, 1)))
    reported = rig.reports.get(timeout=SECONDS)
    assert isinstance(reported, m.WorldFailed), reported
    says(reported.status, Code.UNAVAILABLE, "cannot join the hosts of islands 0, 1")


@BEHAVIOURS.add
def it_fails_functions_that_arrive_for_a_closed_world(rig: Rig) -> None:
    world = joined(rig)
    rig.functions.close_world(m.CloseWorld(world, CLOSED))
    _, status = rig.compile(rig.lower(add, spec(), spec(), devices=(0, 1)), (0, 1), world)
    says(status, Code.DATA_LOSS, "host 1 is gone")


@BEHAVIOURS.add
def it_compiles_a_function_in_the_next_world_if_the_first_one_is_closed_meanwhile(rig: Rig) -> None:
    first, second = rig.fresh(), rig.fresh()
    module = rig.lower(add, spec(), spec(), devices=(0, 1))
    together = rig.request(module, (0, 1), first)
    rig.request(module, (0, 1), second, together)
    rig.functions.close_world(m.CloseWorld(first, CLOSED))
    rig.worlds.join(m.JoinWorld(second, 0, 1))
    reports = [rig.reports.get(timeout=SECONDS) for _ in range(2)]
    assert {type(each) for each in reports} == {m.WorldServed, m.Compiled}, reports
    a = rig.ones(0, 1)
    _, (two,) = rig.call(together, a, a)
    assert rig.shard(two).tolist() == [2, 2, 2, 2]


@BEHAVIOURS.add
def it_leaves_a_world_that_is_closed_while_it_joins(rig: Rig) -> None:
    """It does not wait for another host, and reports nothing."""
    world = rig.fresh()
    rig.worlds.join(m.JoinWorld(world, 0, 2))
    assert isinstance(rig.reports.get(timeout=SECONDS), m.WorldServed)
    rig.functions.close_world(m.CloseWorld(world, CLOSED))
    while any(each.name == "atoll-join-world" for each in threading.enumerate()):
        time.sleep(0.001)
    assert rig.reports.empty()
    with pytest.raises(StatusError, match="lost one another"):
        rig.backend.worlds.client_and_hosts(world)


@BEHAVIOURS.add
def it_cuts_no_connections_of_others_when_a_world_is_closed(rig: Rig) -> None:
    """A thread opens epoll descriptors with connections while the world starts."""
    pairs: list[tuple[socket.socket, socket.socket]] = []
    epolls: list[select.epoll] = []
    is_over = threading.Event()

    def open_connections() -> None:
        while not is_over.is_set() and len(pairs) < 1000:
            pairs.append(socket.socketpair())
            epolls.append(select.epoll())
            epolls[-1].register(pairs[-1][0], select.EPOLLIN)

    opens = threading.Thread(target=open_connections)
    opens.start()
    world = joined(rig)
    module = rig.lower(add, spec(), spec(), devices=(0, 1))
    assert rig.compile(module, (0, 1), world)[1].ok
    is_over.set()
    opens.join()
    rig.functions.close_world(m.CloseWorld(world, CLOSED))
    for one, other in pairs:
        one.send(b"x")
        assert other.recv(1) == b"x"
        one.close()
        other.close()
    for each in epolls:
        each.close()


if __name__ == "__main__":
    BEHAVIOURS.play()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return BEHAVIOURS.outcomes()


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_a_host_in_a_world(outcomes: dict[str, str], name: str):
    assert outcomes.get(name, outcomes[""]) == "ok"
