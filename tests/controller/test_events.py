"""Tests of the event log: given the same events, a controller makes the same decisions, byte for byte."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import msgspec
import pytest

from atoll.cluster.settings import Dispatch
from atoll.errors import OK
from atoll.ir.program import Call, HostBuffer, HostToDevice, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.operate.log_replay import replay
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.migrating_world import MigratingWorld
from tests.controller.play import Cluster, Play, joined
from tests.controller.world import World
from tests.thoroughness import examples, longer

PAIR = ArraySpec("float32", (2,), Sharding((0, 1)))


def replayed(cluster: Cluster) -> list[bytes]:
    events = replay(cluster.controller.log.dump().splitlines())
    return [msgspec.msgpack.encode(action) for _, actions in events for action in actions]


def decided(cluster: Cluster) -> list[bytes]:
    return [msgspec.msgpack.encode(action) for action in cluster.actions]


def recorded(token: str = "", **settings: object) -> Cluster:
    """Return the cluster of a session on an island with two hosts, of which one is lost."""
    cluster = joined("1x2x1", token=token, **settings)
    session = cluster.open().number
    cluster.proxy(session, m.RegisterFunction(1, "content", 9, ((0, 1),)))
    for host in (0, 1):
        cluster.worker(host, m.FeedsArrived(session, (9,)))
    cluster.flush()
    name = cluster.controller.sessions[session].functions[1]
    for host in (0, 1):
        cluster.worker(host, m.Compiled(name, OK, b"", 0.1, False, 64))
    put = HostToDevice((HostBuffer(0, (2,), None, None),), (PAIR,))
    cluster.proxy(session, m.RegisterProgram(2, single("put", (), put, feeds=1)))
    cluster.proxy(session, m.RegisterProgram(3, single("f", (PAIR,), Call(1, (0,), (PAIR,), (0, 1)))))
    cluster.proxy(session, m.Launch(2, (), (10,), (77,)))
    cluster.proxy(session, m.Launch(3, (10,), (11,), ()))
    cluster.proxy(session, m.Await(5, (11,)))
    cluster.flush()
    for host in (0, 1):
        cluster.worker(host, m.FeedsArrived(session, (77,)))
    cluster.flush()
    cluster.tick(1.0)
    cluster.worker(0, m.Done(((1, 5, 9),)))
    cluster.flush()
    cluster.engine(m.WorkerEnded(1, 1001, -9, "killed by SIGKILL"))
    cluster.operator(m.StatusRequest())
    cluster.flush()
    cluster.close(session)
    cluster.flush()
    return cluster


@pytest.mark.parametrize("settings", [{}, {"dispatch": Dispatch.SEQUENTIAL}, {"device_memory": 100}])
def test_a_log_replays_to_the_same_decisions(settings):
    cluster = recorded(**settings)
    sent = [action.message for action in cluster.actions if isinstance(action, a.Send)]
    assert {m.Run, m.Awaited, m.HostsFailed, m.Welcome, m.StatusReply} <= {type(message) for message in sent}
    assert replayed(cluster) == decided(cluster)


def played(kind: type[World], seed: int) -> World:
    """Return a world in which random clients have acted for a while."""
    rng = random.Random(seed)
    world = kind(rng, rng.choice(["2x1x2", "1x2x2", "3x1x1"]), 0.1, device_memory=rng.choice([0, 100]))
    for _ in range(3):
        world.open()
    for step in range(1000):
        if step >= 120 and world.cluster.events["Received"] > 100:
            break
        if rng.random() < 0.7:
            rng.choice(list(world.clients.values())).act()
            world.deliver()
        elif kind is World and rng.random() < 0.05 and not world.down:
            world.lose(rng.choice(sorted(world.controller.resources.islands)))
        elif isinstance(world, MigratingWorld) and rng.random() < 0.3:
            (world.suspend if rng.random() < 0.2 else world.move)()
        else:
            world.work()
    world.settle()
    return world


@longer
@pytest.mark.parametrize("seed", range(examples(10)))
@pytest.mark.parametrize("kind", [World, MigratingWorld])
def test_whatever_clients_do_replays_to_the_last_byte(kind, seed):
    world = played(kind, seed)
    assert world.cluster.events["Received"] > 100
    assert replayed(world.cluster) == decided(world.cluster)


REPLAY = """
import hashlib, sys
import msgspec
from atoll.operate.log_replay import replay
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        actions = [action for _, actions in replay(file.read().splitlines()) for action in actions]
    print(hashlib.sha256(msgspec.msgpack.encode(actions)).hexdigest())
"""


def test_another_process_decides_the_same(tmp_path):
    """The order of sets differs there."""
    expected, paths = [], []
    for kind in (World, MigratingWorld):
        for seed in range(2):
            cluster = played(kind, 100 + seed).cluster
            paths.append(tmp_path / f"{kind.__name__}-{seed}")
            paths[-1].write_bytes(cluster.controller.log.dump())
            expected.append(hashlib.sha256(msgspec.msgpack.encode(cluster.actions)).hexdigest())
    for seed in ("1", "2"):
        ended = subprocess.run(
            [sys.executable, "-c", REPLAY, *map(str, paths)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.stdout.split() == expected, ended.stderr


def test_every_action_names_the_event_that_caused_it():
    play = Play("1x1x1")
    play.with_call()
    play.array(10)
    play.proxy(play.session, m.Launch(1, (10,), (11,), ()))
    launched = sum(play.events.values())
    play.proxy(play.session, m.Await(1, (10,)))
    causes = {type(each.message): each.cause for each in play.flush() if isinstance(each, a.Send)}
    assert causes == {m.Run: launched, m.Awaited: launched + 1}


def test_the_token_is_in_no_log_and_the_log_replays():
    cluster = recorded(token="the secret of the cluster")
    cluster.token = "a wrong one"
    cluster.connect("operator")
    cluster.flush()
    dump = cluster.controller.log.dump()
    lines = [msgspec.json.decode(line) for line in dump.splitlines()]
    assert not any(b"the secret of" in line for line in dump.splitlines())
    assert not any("VGhlIHNlY3JldCBvZ" in str(line) or "a wrong one" in str(line) for line in lines)
    events = [event for event, _ in replay(dump.splitlines())]
    tokens = [event.message.token for event in events if isinstance(getattr(event, "message", None), m.Hello)]
    assert set(tokens) == {"right", "wrong"}
    assert replayed(cluster) == decided(cluster)


def test_contents_that_a_launch_carries_are_in_no_log_and_the_log_replays():
    play = Play()
    play.with_put()
    play.send(m.Launch(2, (), (10,), (77,), contents=b"a weight"))
    play.flush()
    dump = play.controller.log.dump().splitlines()
    launches = [event.message for event, _ in replay(dump) if isinstance(getattr(event, "message", None), m.Launch)]
    assert [each.contents for each in launches] == [bytes(8)]
    runs = [action.message for _, actions in replay(dump) for action in actions if isinstance(action, a.Send)]
    assert [each.contents for each in runs if isinstance(each, m.Run)] == [bytes(8)]


def test_a_log_that_has_lost_its_beginning_says_so(monkeypatch):
    monkeypatch.setattr("atoll.journal.event_log.MAX_EVENTS", 10)
    cluster = recorded()
    assert cluster.controller.log.statistics()["events"] == 10
    with pytest.raises(ValueError, match=r"lacks \d+ events at its start"):
        list(replay(cluster.controller.log.dump().splitlines()))


def test_a_log_is_bounded_by_its_bytes():
    play = Play()
    play.with_function()
    for query in range(6):
        play.proxy(play.session, m.Query(query, m.QueryKind.TEXT, 0, 1, b""))
        play.worker(0, m.WorkerAnswer(play.session, query + 1, OK, bytes(10 << 20)))
        play.flush()
    statistics = play.controller.log.statistics()
    assert statistics["bytes"] <= 32 << 20
    assert statistics["missing"] > 0
    assert statistics["events"] + statistics["missing"] == sum(play.events.values())
    assert len(play.controller.log.dump()) < 64 << 20, "it fits into one message"


@pytest.mark.parametrize("lines", [[], [b"{}"], [b"no JSON"]])
def test_what_is_no_log_is_refused(lines):
    with pytest.raises(ValueError, match="not an event log"):
        list(replay(lines))


def test_events_are_read_back_as_their_kinds():
    cluster = recorded()
    events = [event for event, _ in replay(cluster.controller.log.dump().splitlines())]
    assert isinstance(events[0], e.Started)
    assert {type(event).__name__: events.count(event) for event in events if isinstance(event, e.Tick)} == {"Tick": 1}
