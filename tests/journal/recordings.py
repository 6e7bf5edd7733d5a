"""Recordings of controllers by the version that made the decisions: what they decided for which events.

`tests/journal/decisions` has a directory for each value of the setting `decisions` that this version repeats. A journal
is replayed as it was written, so a later version with the same value decides the same: see `test_recordings.py`.

`python -m tests.journal.recordings` adds what is missing in the directory of the present value.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from atoll.cluster.settings import DECISIONS
from atoll.controller.controller_dumps import load_controller
from atoll.controller.core import Controller
from atoll.errors import OK
from atoll.ir.program import Call, HostBuffer, HostToDevice, Mapping, Rearrange, single
from atoll.journal.event_log import replayed
from atoll.journal.records import decode_events, read_turns
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from tests.controller.control_flow_world import ChoosingWorld
from tests.controller.migrating_world import MigratingWorld
from tests.controller.outcome import play
from tests.controller.play import BROKEN, Play, on
from tests.controller.publishing_play import Trainer
from tests.controller.publishing_world import PublishingWorld
from tests.controller.spanning_world import SpanningWorld
from tests.controller.test_tenants import shared
from tests.controller.world import World
from tests.journal.stored import facts
from tests.journal.worlds import Recorded
from tests.migration.test_suspensions import SuspendPlay

RECORDINGS = Path(__file__).resolve().parent / "decisions"
_MAX_BYTES = 64  # of contents that are compared
_SIZE = 8  # bytes of an array on each of its devices


class Recording(msgspec.Struct, frozen=True):
    """The events of a controller, and what it decided.

    Attributes:
      snapshot: a dump of the controller before the first turn.
      turns: the turns as a journal has them.
      actions: for each turn, its actions as JSON (`described`), and the bytes that are in use after them.
      facts: what is in the controller after the last turn (`stored.facts`).
    """

    snapshot: bytes
    turns: list[bytes]
    actions: list[Any]
    facts: dict[str, Any]


def described(value: Any) -> Any:
    """Return a value as JSON, without what later versions may change: added fields and the texts for people."""
    match value:
        case msgspec.Struct():
            return [type(value).__name__, _described_fields(value, _fields_of_struct(type(value)))]
        case enum.Enum():
            return value.name
        case str():
            return "..." if " " in value else value
        case None | bool() | int() | float():
            return value
        case bytes() | msgspec.Raw():
            return bytes(value).hex() if len(bytes(value)) <= _MAX_BYTES else "..."
        case dict():
            return [[described(key), described(each)] for key, each in value.items()]
        case set() | frozenset():
            return sorted(map(described, value), key=json.dumps)
        case tuple() | list():
            return [described(each) for each in value]
    assert dataclasses.is_dataclass(value), type(value)
    names = {each.name: each for each in dataclasses.fields(value)}
    return [type(value).__name__, _described_fields(value, names)]


@functools.cache
def _fields_of_struct(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of a struct by name. `msgspec` resolves their types for each call, which takes long."""
    return {each.name: each for each in msgspec.structs.fields(kind)}


def _described_fields(value: Any, fields: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, each in fields.items():
        has_factory = callable(each.default_factory)
        default = each.default_factory() if has_factory else each.default
        content = getattr(value, name)
        if content != default:
            found[name] = described(content)
    return found


def decided(controller: Controller, turn: bytes) -> list[Any]:
    """Have a controller handle the events of a turn. Return its actions, and the bytes in use after them."""
    events = list(decode_events(turn))
    actions = [action for _, some in replayed(controller.handle, events) for action in some]
    found = [described(action) for action in actions if type(action) not in (a.Log, a.StoreEstimates)]
    return [*found, ["memory", controller.ledger.total]]


# ---- what is recorded


def _world(kind: type[World], seed: int, steps: int, loss: float, topology: str, **settings: Any) -> Recorded:
    world = kind(random.Random(seed), topology, 0.1, **settings)
    del world.controller.launches.reservations.waits.hopeless
    recorded = Recorded(world.controller)
    world.controller = world.cluster.controller = recorded  # type: ignore[assignment]
    play(world, world.rng, steps, loss)
    return recorded


def _play(play: Play) -> Recorded:
    recorded = Recorded(play.controller)
    play.controller = recorded  # type: ignore[assignment]
    return recorded


def _registered(play: Play, function: int = 1, devices: tuple[int, ...] = (0, 1)) -> str:
    """Register a function whose source has arrived. Return its name on the hosts."""
    sent = play.send(m.RegisterFunction(function, f"content {function}", 900 + function, (devices,)))
    for host in range(play.topology.host_count):
        sent += play.report(host, m.FeedsArrived(play.session, (900 + function,)))
    for each in sent:
        if type(each) is m.JoinWorld and each.rank == 0:
            play.report(devices[0], m.WorldServed(each.world, "unix:/world"))
    return play.controller.sessions[play.session].functions[function]


def _compiled(play: Play, function: int, devices: tuple[int, ...]) -> None:
    """Register and compile a function, and a program with its number that calls it."""
    name = _registered(play, function, devices)
    for host in sorted({play.topology.island_of(device) for device in devices}):
        play.report(host, m.Compiled(name, OK, b"", 0.1, False))
    call = Call(function, (), (on(*devices),), devices)
    play.send(m.RegisterProgram(function, single("f", (), call)))


def _restart(play: Play, island: int) -> None:
    play.lose(island, "its connection broke")
    play.send(m.FailureAcknowledged((island,), (), ()))
    play.join_again(island)


def _first_compilation_loses_its_island() -> Recorded:
    play = Play("2x1x1")
    recorded = _play(play)
    name = _registered(play)
    play.lose(1, "its connection broke")
    play.report(0, m.Compiled(name, BROKEN, b"", 0.1, False))
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.join_again(1)
    play.send(m.Recompile(1, 950))
    for host in (0, 1):
        play.report(host, m.FeedsArrived(play.session, (950,)))
    for host in (1, 0):
        play.report(host, m.Compiled(name, OK, b"", 0.1, False))
    return recorded


def _functions_of_lost_islands() -> Recorded:
    play = Play("2x1x1")
    recorded = _play(play)
    _compiled(play, 1, (0, 1))
    _compiled(play, 2, (0,))
    _restart(play, 0)
    play.send(m.Recompile(2, 950))
    play.report(0, m.FeedsArrived(play.session, (950,)))
    play.report(0, m.Compiled(play.controller.sessions[play.session].functions[2], OK, b"", 0.1, False))
    play.send(m.Launch(2, (), (12,), ()))
    play.engine(m.IslandNotRestarted(1, "it failed too often"))
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.send(m.Recompile(1, 951))
    play.report(0, m.FeedsArrived(play.session, (951,)))
    play.send(m.Launch(2, (), (13,), ()))
    return recorded


def _compilation_loses_its_island_again() -> Recorded:
    play = Play("2x1x1")
    recorded = _play(play)
    _compiled(play, 1, (0, 1))
    name = play.controller.sessions[play.session].functions[1]
    _restart(play, 1)
    play.send(m.Launch(1, (), (11,), ()))
    play.send(m.Recompile(1, 950))
    for host in (0, 1):
        play.report(host, m.FeedsArrived(play.session, (950,)))
    play.report(1, m.Compiled(name, OK, b"", 0.1, False))
    play.lose(1, "its connection broke again")
    play.report(0, m.Compiled(name, BROKEN, b"", 0.1, False))
    play.send(m.FailureAcknowledged((1,), (), ()))
    play.send(m.Launch(1, (), (12,), ()))
    play.join_again(1)
    play.send(m.Recompile(1, 951))
    for host in (0, 1):
        play.report(host, m.FeedsArrived(play.session, (951,)))
        play.report(host, m.Compiled(name, OK, b"", 0.1, False))
    return recorded


def _compilation_fails_after_a_restart() -> Recorded:
    play = Play("2x1x1")
    recorded = _play(play)
    _compiled(play, 1, (0,))
    _compiled(play, 2, (1,))
    name = play.controller.sessions[play.session].functions[2]
    for number, status in enumerate((BROKEN, OK)):
        _restart(play, 1)
        play.send(m.Launch(2, (), (11 + number,), ()))
        play.send(m.Recompile(2, 950 + number))
        play.report(1, m.FeedsArrived(play.session, (950 + number,)))
        play.report(1, m.Compiled(name, status, b"", 0.1, False))
        play.send(m.Launch(2, (), (13 + number,), ()))
    return recorded


def _one_function_under_two_numbers() -> Recorded:
    play = Play("1x1x2")
    recorded = _play(play)
    for number in (1, 2):
        play.send(m.RegisterFunction(number, "content", 900 + number, ((0,),)))
        for each in play.report(0, m.FeedsArrived(play.session, (900 + number,))):
            play.report(0, m.Compiled(each.function, OK, b"", 0.1, False))
    play.send(m.RegisterProgram(2, single("f", (), Call(2, (), (on(0),), (0,)))))
    _restart(play, 0)
    play.send(m.ReleaseFunction(1))
    play.send(m.Launch(2, (), (12,), ()))
    return recorded


def _arrays_on_several_islands_are_lost() -> Recorded:
    play = Play("3x1x1", device_memory=4 * _SIZE)
    recorded = _play(play)
    _compiled(play, 1, (0, 1, 2))
    _compiled(play, 2, (0,))
    for handle in range(11, 14):
        sent = play.send(m.Launch(1, (), (handle,), ()))
        for host, run in enumerate([each for each in sent if type(each) is m.Run]):
            play.done(run.sequence, host=host)
    sent = play.send(m.Launch(1, (), (14,), ()))
    first = next(each for each in sent if type(each) is m.Run)
    play.done(first.sequence)
    _restart(play, 1)
    play.send(m.Release((11, 12)))
    for handle in range(15, 20):
        play.send(m.Launch(2, (), (handle,), ()))
    play.report(2, m.Failed(first.sequence + 2, BROKEN))
    return recorded


def _long_lists() -> Recorded:
    """More than a turn handles, from two sessions."""
    play = Play()
    recorded = _play(play)
    play.with_put()
    other = play.open().number
    for first in range(0, 8000, 2000):
        for session in (play.session, other):
            play.proxy(session, m.MakeError(tuple(range(100 + first, 2100 + first)), OK.reworded("it failed")))
            play.proxy(session, m.Await(1 + first, tuple(range(100 + first, 2100 + first))))
    play.outbox()
    play.proxy(play.session, m.Release(tuple(range(100, 8100))))
    play.close(other)
    play.outbox()
    return recorded


def _delayed_uploads() -> Recorded:
    """A tenant launches more uploads than its limit allows, and one of them lacks its bytes."""
    play = shared(upload_rate=1)
    recorded = _play(play)
    bob = play.open(token="bob")
    play.open(token="alice")
    play.proxy(
        bob.number,
        m.RegisterProgram(7, single("put", (), HostToDevice((HostBuffer(0, (100,), None, None),), (on(0),)), feeds=1)),
    )
    for feed in range(2):
        play.proxy(bob.number, m.Launch(7, (), (50 + feed,), (feed,)))
    play.worker(0, m.FeedsArrived(bob.number, (0,)))
    for now in range(0, 400, 10):
        play.tick(float(now))
        play.outbox()
    play.worker(0, m.FeedsArrived(bob.number, (1,)))
    play.outbox()
    return recorded


def _versions() -> Recorded:
    """Replace versions, publish one of many arrays, and lose the island that has them."""
    trainer = Trainer("2x1x2")
    recorded = _play(trainer)
    for _ in range(3):
        trainer.complete()
    whole, handles = (0, 1, 1), tuple(range(1000, 1300))
    views = Rearrange((0,), (on(0),) * len(handles), tuple(Mapping(0, i, whole, whole) for i in range(len(handles))))
    trainer.send(m.RegisterProgram(9, single("publish", (on(0),), views)))
    sent = trainer.send(m.Launch(9, (10,), handles, ()))
    trainer.send(m.Publish(trainer.request(), "policy", 2, handles, tuple(map(str, handles))))
    trainer.done(next(each for each in sent if type(each) is m.Run).sequence)
    trainer.operator(m.RemoveArraysRequest("trainer/policy", 4))
    trainer.outbox()
    trainer.engine(m.IslandNotRestarted(1, "it failed too often"))
    _restart(trainer, 0)
    trainer.close(trainer.session)
    trainer.outbox()
    return recorded


def _files_of_an_absent_host() -> Recorded:
    """End a session that is suspended to disk, while the host that has its file is not there."""
    play = SuspendPlay()
    recorded = _play(play)
    play.suspended(to_disk=True)
    play.lose(0, "its connection broke")
    play.close(play.session)
    play.outbox()
    play.join_again(0)
    return recorded


RECORDED: dict[str, Callable[[], Recorded]] = {
    "world": lambda: _world(World, 1, 90, 0.05, "2x1x2", device_memory=100),
    "hosts": lambda: _world(World, 2, 90, 0.05, "2x2x1"),
    "relays": lambda: _world(World, 3, 90, 0.05, "3x1x1", relay_group=2),
    "choosing": lambda: _world(ChoosingWorld, 4, 90, 0.05, "2x1x2", device_memory=200),
    "migrating": lambda: _world(MigratingWorld, 5, 90, 0.0, "2x1x2", device_memory=100),
    "publishing": lambda: _world(PublishingWorld, 6, 90, 0.05, "2x1x2"),
    "spanning": lambda: _world(SpanningWorld, 7, 90, 0.05, "3x1x1"),
    "compilations": _first_compilation_loses_its_island,
    "functions": _functions_of_lost_islands,
    "recompilations": _compilation_loses_its_island_again,
    "failed_recompilations": _compilation_fails_after_a_restart,
    "numbers": _one_function_under_two_numbers,
    "losses": _arrays_on_several_islands_are_lost,
    "lists": _long_lists,
    "versions": _versions,
    "delayed": _delayed_uploads,
    "files": _files_of_an_absent_host,
}


def record(name: str) -> Recording:
    """Play the events with a controller of this version. Return what it has decided, as a replay does."""
    recorded = RECORDED[name]()
    controller = load_controller(recorded.snapshots[0])
    turns = [bytes(body) for turn in recorded.turns for _, body in read_turns(turn)]
    actions = [decided(controller, turn) for turn in turns]
    return Recording(recorded.snapshots[0], turns, actions, facts(controller))


def read(path: Path) -> Recording:
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Recording)


def stored() -> Iterator[Path]:
    """Yield the files of all recordings."""
    yield from sorted(RECORDINGS.glob("*/*.gz"))


def main(number: int) -> None:
    for name in RECORDED:
        path = RECORDINGS / str(number) / f"{name}.gz"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(msgspec.msgpack.encode(record(name)), mtime=0))
            print(f"wrote {path}: commit it")


if __name__ == "__main__":
    main(DECISIONS)
