"""Tests of fair shares of device time, with a model of islands in virtual time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from atoll.cluster.tenant_settings import TenantSettings
from atoll.launch.policies.fair import FairShares
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.tenants import Tenant
from tests.launch.pausable_scheduler import Scheduler

US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000


@dataclass(eq=False)
class Client:
    """Client that keeps as many gangs enqueued as it may. All times are in nanoseconds."""

    session: int
    tenant: Tenant
    takes: int  # duration of a gang
    islands: tuple[int, ...] = (0,)
    begins: int = 0
    pauses: tuple[tuple[int, int], ...] = ()  # (start, end)
    expected: int = 0  # estimate of the duration, if it differs from it
    limit: int = 0  # maximum number of enqueued nodes, if it differs from that of `play`
    latency: int = 0  # time from the end of a gang to the next launch
    idle_until: int = 0
    in_line: int = 0
    got: list[tuple[int, int]] = field(default_factory=list)  # (end of a gang, its duration)

    def wants(self, now: int) -> bool:
        return now >= max(self.begins, self.idle_until) and not any(start <= now < end for start, end in self.pauses)

    def device_time(self, start: int, end: int) -> int:
        return sum(took for ended, took in self.got if start < ended <= end)

    def had(self, end: int) -> int:
        """Return the device time until `end`, including the relevant part of a gang that ends later."""
        return sum(min(took, max(0, end - (ended - took))) for ended, took in self.got)


class Island:
    """An island that runs its gangs one after another."""

    def __init__(self) -> None:
        self.free_at = 0


def tenant(name: str, share: float = 1.0, priority: int = 0) -> Tenant:
    return Tenant(TenantSettings(name, share=share, priority=priority))


def play(clients: list[Client], until: int, islands: int = 1, limit: int = 64, launch_ns: int = 0) -> None:
    """Run the clients. Each of them keeps `limit` nodes enqueued while it is active.

    Each launch takes `launch_ns` of an island in addition to its gang.
    """
    rng = random.Random(0)
    scheduler = Scheduler[Client](islands, 24)
    places = [Island() for _ in range(islands)]
    for island in range(islands):
        scheduler.set_limits(island, 24, launch_ns)
    ends: list[tuple[int, int, Gang[Client], int]] = []
    now = number = 0
    while now < until:
        for client in clients:
            while client.wants(now) and client.in_line < (client.limit or limit):
                number += 1
                client.in_line += 1
                node = QueuedNode[Client](number, client.session, tenant=client.tenant)
                node.gangs = tuple(
                    Gang(10 * number + island, island, node, client, client.expected or client.takes)
                    for island in client.islands
                )
                scheduler.enqueue(node)
        scheduler.touched.clear()
        for island, place in enumerate(places):
            while (gang := scheduler.start_next(island)) is not None:
                took = int(gang.run.takes * rng.uniform(0.9, 1.1))
                place.free_at = max(place.free_at, now) + took + launch_ns
                heapq.heappush(ends, (place.free_at, gang.sequence, gang, took))
        events = [ends[0][0]] if ends else []
        events += [at for client in clients for at in (client.begins, client.idle_until) if at > now]
        events += [at for client in clients for pause in client.pauses for at in pause if at > now]
        now = min(events, default=until)
        while ends and ends[0][0] <= now:
            _, _, gang, took = heapq.heappop(ends)
            scheduler.finished(gang, took)
            gang.run.got.append((now, took))
            gang.run.in_line -= gang is gang.node.gangs[-1]
            gang.run.idle_until = now + gang.run.latency


def shares(clients: list[Client], start: int, end: int) -> list[float]:
    times = [client.device_time(start, end) for client in clients]
    return [time / sum(times) for time in times]


def test_a_tenant_with_tiny_launches_leaves_others_their_share_of_the_time_that_launches_take():
    long, tiny = Client(1, tenant("long"), 8 * MS), Client(2, tenant("tiny"), 20 * US)
    play([long, tiny], 10 * SECOND, launch_ns=MS // 2)
    # Without charges for launches, `long` gets a twentieth of the time.
    assert long.device_time(0, 10 * SECOND) == pytest.approx(5 * SECOND * 8 / 8.5, rel=0.05)


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
@pytest.mark.parametrize("takes", [(330 * US,) * 4, (2400 * US,) * 4, (300 * US, 30 * MS, 300 * US, 30 * MS)])
def test_tenants_get_device_time_in_proportion_to_their_shares(weights, takes):
    clients = [
        Client(number, tenant(str(number), weight), each)
        for number, (weight, each) in enumerate(zip(weights, takes, strict=True), 1)
    ]
    play(clients, 5 * SECOND)
    found = shares(clients, 0, 5 * SECOND)
    assert found == pytest.approx([weight / sum(weights) for weight in weights], rel=0.02)


def test_sessions_of_a_tenant_share_its_device_time():
    one, two = tenant("one"), tenant("two", share=2)
    clients = [Client(1, one, MS), Client(2, one, 3 * MS), Client(3, two, MS)]
    play(clients, 5 * SECOND)
    assert shares(clients, 0, 5 * SECOND) == pytest.approx([1 / 6, 1 / 6, 2 / 3], rel=0.02)


def test_sessions_of_the_only_tenant_have_equal_shares_until_another_tenant_arrives():
    one, two = tenant("one"), tenant("two")
    clients = [Client(1, one, MS), Client(2, one, 3 * MS), Client(3, two, MS, begins=2 * SECOND)]
    play(clients, 4 * SECOND)
    assert shares(clients, 0, 2 * SECOND) == pytest.approx([1 / 2, 1 / 2, 0], rel=0.02)
    assert shares(clients, 2 * SECOND + 100 * MS, 4 * SECOND) == pytest.approx([1 / 4, 1 / 4, 1 / 2], rel=0.03)


def add(policy: FairShares, session: int, owner: Tenant) -> None:
    policy.add(QueuedNode[None](0, session, tenant=owner))


def commit(policy: FairShares) -> Gang[None]:
    """Return the next gang."""
    node = policy.take()
    assert node is not None
    gang = Gang[None](0, 0, node, None, MS)
    policy.commit(gang)
    return gang


def served(policy: FairShares, sessions: dict[int, Tenant], count: int) -> list[int]:
    """Return the sessions in the order in which they are served, if each always has a ready node.

    Gangs take the expected 1 ms.
    """
    taken = []
    for _ in range(count):
        gang = commit(policy)
        session = gang.node.session
        add(policy, session, sessions[session])
        policy.charge(gang, MS)
        taken.append(session)
    return taken


def test_the_last_session_gets_all_device_time_and_shares_it_with_new_sessions():
    one, two = tenant("one"), tenant("two")
    policy, sessions = FairShares(), {1: one, 2: two, 3: two, 4: one, 5: one}
    for session in (1, 2, 3):
        add(policy, session, sessions[session])
        add(policy, session, sessions[session])
    assert sorted(Counter(served(policy, sessions, 40)).values()) == [10, 10, 20]
    policy.forget(1)
    assert set(Counter(served(policy, sessions, 40)).values()) == {20}, "the only tenant's sessions"
    policy.forget(2)
    assert set(served(policy, sessions, 5)) == {3}
    add(policy, 4, one)
    assert set(Counter(served(policy, sessions, 40)).values()) == {20}
    add(policy, 5, one)
    assert sorted(Counter(served(policy, sessions, 40)).values()) == [10, 10, 20]


def test_gangs_on_two_islands_are_charged_on_each():
    clients = [
        Client(1, tenant("both", 3), MS, islands=(0, 1)),
        Client(2, tenant("first"), MS, islands=(0,)),
        Client(3, tenant("second"), MS, islands=(1,)),
    ]
    play(clients, 5 * SECOND, islands=2)
    assert clients[0].device_time(0, 5 * SECOND) / (10 * SECOND) == pytest.approx(0.75, rel=0.02)
    assert clients[1].device_time(0, 5 * SECOND) == pytest.approx(clients[2].device_time(0, 5 * SECOND), rel=0.02)


def test_many_tenants_with_random_shares():
    rng = random.Random(1)
    weights = [rng.uniform(0.5, 8) for _ in range(32)]
    clients = [Client(number, tenant(str(number), weight), MS) for number, weight in enumerate(weights)]
    play(clients, 10 * SECOND)
    assert shares(clients, 0, 10 * SECOND) == pytest.approx([weight / sum(weights) for weight in weights], rel=0.03)


def test_a_session_that_waits_for_each_of_its_results_gets_its_share():
    clients = [Client(number, tenant(str(number)), 2400 * US) for number in range(4)]
    clients[0].limit, clients[0].latency = 1, MS
    play(clients, 5 * SECOND)
    assert shares(clients, 0, 5 * SECOND) == pytest.approx([0.25] * 4, rel=0.02)


def test_others_use_the_share_of_an_idle_tenant_and_return_it_at_once():
    clients = [Client(number, tenant(str(number)), MS) for number in range(1, 5)]
    clients[0].pauses = ((2 * SECOND, 4 * SECOND),)
    play(clients, 6 * SECOND, limit=16)
    away = shares(clients, 2 * SECOND + 50 * MS, 4 * SECOND)
    assert away == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3], rel=0.02, abs=0.005)
    assert sum(client.device_time(2 * SECOND, 4 * SECOND) for client in clients) == pytest.approx(2 * SECOND, rel=0.01)
    back = shares(clients, 4 * SECOND + 50 * MS, 4 * SECOND + 450 * MS)
    assert back == pytest.approx([0.25] * 4, rel=0.05), "the pause is neither credited nor charged"


def test_a_new_session_gets_its_share_at_once():
    clients = [Client(1, tenant("old"), MS), Client(2, tenant("new"), MS, begins=3 * SECOND)]
    play(clients, 4 * SECOND)
    assert shares(clients, 3 * SECOND + 50 * MS, 4 * SECOND) == pytest.approx([0.5, 0.5], rel=0.02)


@pytest.mark.parametrize("others", [1, 256])
def test_a_higher_priority_waits_for_two_gangs_at_most(others):
    low = [Client(number, tenant(f"low {number}"), 200 * MS) for number in range(others)]
    begins = [3 * SECOND + i * 790 * MS for i in range(20)]
    high = [Client(1000 + i, tenant("high", priority=1), MS, begins=at) for i, at in enumerate(begins)]
    for client, at in zip(high, begins, strict=True):
        client.pauses = ((at + 1, 1 << 62),)
    play([*low, *high], 22 * SECOND, limit=1 if others > 1 else 4)
    waits = sorted(client.got[0][0] - client.begins - client.got[0][1] for client in high)
    assert waits[-1] <= 1.1 * 2 * 220 * MS  # gangs take up to 220 ms here


def test_a_changed_share_applies_at_once():
    one, two = tenant("one"), tenant("two")
    clients = [Client(1, one, MS), Client(2, two, MS)]
    play(clients, SECOND)
    one.settings = TenantSettings("one", share=3.0)
    again = [Client(1, one, MS), Client(2, two, MS)]
    play(again, SECOND)
    assert shares(again, 0, SECOND) == pytest.approx([0.75, 0.25], rel=0.03)


@pytest.mark.parametrize("reserve", [0, 5, 20])
@pytest.mark.parametrize("takes", [MS, 30 * MS])
def test_a_reserve_is_kept_for_a_lower_priority(reserve, takes):
    high = Client(1, tenant("high", priority=1), 2 * MS)
    low = Client(2, Tenant(TenantSettings("low", reserve=reserve)), takes)
    play([high, low], 10 * SECOND)
    assert low.device_time(0, 10 * SECOND) / (10 * SECOND) == pytest.approx(reserve / 100, abs=0.02)


def test_a_changed_reserve_applies_to_a_tenant_that_waits():
    policy, low = FairShares(), tenant("low")
    sessions = {1: tenant("high", priority=1), 2: low}
    for session in (1, 2):
        add(policy, session, sessions[session])
    assert 2 not in served(policy, sessions, 20)
    low.settings = TenantSettings("low", reserve=50)
    policy.tenant_changed(low)
    assert served(policy, sessions, 20).count(2) >= 9


def test_a_changed_priority_applies_to_a_tenant_that_waits():
    policy, low = FairShares(), tenant("low")
    sessions = {1: tenant("high", priority=1), 2: low}
    for session in (1, 2):
        add(policy, session, sessions[session])
    assert 2 not in served(policy, sessions, 20)
    low.settings = TenantSettings("low", priority=2)
    policy.tenant_changed(low)
    assert set(served(policy, sessions, 20)[1:]) == {2}


def test_an_unused_reserve_is_not_saved_up():
    high = Client(1, tenant("high", priority=1), 2 * MS)
    low = Client(2, Tenant(TenantSettings("low", reserve=10)), MS, pauses=((SECOND, 6 * SECOND),))
    play([high, low], 7 * SECOND)
    assert low.device_time(6 * SECOND, 7 * SECOND) / SECOND == pytest.approx(0.1, abs=0.03)


def test_a_changed_priority_applies_at_once_even_for_the_only_tenant():
    policy, sessions = FairShares(), {1: tenant("one"), 2: tenant("one"), 3: tenant("other")}
    sessions[2] = sessions[1]
    for session in (1, 2):
        add(policy, session, sessions[session])
    served(policy, sessions, 10)
    sessions[1].settings = TenantSettings("one", priority=1)
    served(policy, sessions, 2)
    add(policy, 3, sessions[3])
    assert 3 not in served(policy, sessions, 20)[2:], "after ready nodes, the higher priority is first"
    sessions[3].settings = TenantSettings("other", priority=2)
    add(policy, 3, sessions[3])
    assert set(served(policy, sessions, 20)) == {3}


@pytest.mark.parametrize("expected", [MS // 10, 10 * MS])
def test_a_session_with_a_wrong_estimate_gets_its_share(expected):
    clients = [Client(1, tenant("wrong"), MS, expected=expected), Client(2, tenant("right"), MS)]
    play(clients, 5 * SECOND)
    assert shares(clients, 0, 5 * SECOND) == pytest.approx([0.5, 0.5], rel=0.02)


def test_an_estimate_that_was_too_long_is_corrected_when_the_gangs_have_ended():
    policy, sessions = FairShares(), {1: tenant("one"), 2: tenant("two")}
    gangs = []
    for _ in range(3):
        add(policy, 1, sessions[1])
        add(policy, 2, sessions[2])
        for _ in range(2):
            node = policy.take()
            assert node is not None
            gang = Gang[None](0, 0, node, None, 10 * MS if node.session == 1 else MS)
            policy.commit(gang)
            gangs += [gang] * (node.session == 1)
    for session in sessions:
        add(policy, session, sessions[session])
    assert served(policy, sessions, 5) == [2] * 5
    for gang in gangs:
        policy.charge(gang, 5 * MS)
    assert served(policy, sessions, 5) == [1] * 5


def test_gangs_that_did_not_run_do_not_increase_a_share():
    policy, sessions = FairShares(), {1: tenant("one"), 2: tenant("two")}
    add(policy, 1, sessions[1])
    alone = []
    for _ in range(24):
        alone.append(commit(policy))
        add(policy, 1, sessions[1])
    add(policy, 2, sessions[2])
    for gang in alone:
        policy.charge(gang, 0)
    assert Counter(served(policy, sessions, 20)) == {1: 10, 2: 10}


def test_long_gangs_do_not_increase_a_share_on_average():
    clients = [Client(1, tenant("short"), 300 * US), Client(2, tenant("long", 2), 30 * MS)]
    clients += [Client(3, tenant("shorter", 4), 300 * US), Client(4, tenant("longer", 8), 40 * MS)]
    play(clients, 20 * SECOND)
    for client, share, gang in ((clients[1], 2 / 15, 30 * MS), (clients[3], 8 / 15, 40 * MS)):
        ahead = [client.had(end) - share * end for end in range(2 * SECOND, 20 * SECOND, 17 * MS)]
        assert sum(ahead) / len(ahead) == pytest.approx(0, abs=gang / 8)
        assert max(map(abs, ahead)) < 0.75 * gang
