"""Tests that every prefix of a journal is a valid state: wherever it is truncated, the restarted controller is
consistent.
"""

from __future__ import annotations

import random
from functools import cache

import msgspec
import pytest

from atoll.journal.event_log import replayed
from atoll.journal.records import decode_events, read_turns
from atoll.protocol import events as e
from atoll.telemetry.consistency import contradictions
from tests.controller.migrating_world import MigratingWorld
from tests.controller.world import World
from tests.journal.worlds import Recorded, act, world_of
from tests.thoroughness import TIMES

# For each kind of world. `make thorough` tests ten thousand.
CUTS, FLIPS = (60, 40) if TIMES == 1 else (3000, 2000)
KINDS = {"World": World, "MigratingWorld": MigratingWorld}


@cache
def recorded(kind: str, seed: int) -> Recorded:
    world, recording = world_of(seed, KINDS[kind])
    for step in range(60):
        act(world)
        if step % 8 == 0:
            recording.snapshot()
    world.settle()
    assert contradictions(recording.controller) == []
    return recording


def check_legal(recording: Recorded, content: bytes, before: int) -> int:
    """Replay the complete turns of this text after the previous snapshot. Return their number."""
    turns = [bytes(turn) for _, turn in read_turns(content)]
    controller = recording.restored(before)
    for turn in turns:
        for _ in replayed(controller.handle, decode_events(turn)):
            pass
    assert contradictions(controller) == []
    controller.handle(e.Restarted(10_000.0, 2))
    controller.handle(e.Tick(10_000.0))
    controller.handle(e.Flush(10_000.0))
    assert contradictions(controller) == []
    return len(turns)


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_cut_off_a_journal_the_rest_is_a_legal_state(kind):
    rng = random.Random(kind)
    for number in range(CUTS):
        recording = recorded(kind, number % (4 * TIMES))
        before = rng.choice(sorted(recording.snapshots))
        content = b"".join(recording.turns[before : before + rng.randint(1, 60)])
        cut = rng.randint(0, len(content))
        check_legal(recording, content[:cut], before)


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_whichever_bit_changes_what_is_before_it_is_read_and_nothing_else(kind):
    rng = random.Random(kind)
    for number in range(FLIPS):
        recording = recorded(kind, number % (4 * TIMES))
        before = rng.choice(sorted(recording.snapshots))
        turns = recording.turns[before : before + rng.randint(1, 40)]
        content = bytearray(b"".join(turns))
        if not content:
            continue
        place = rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
        whole, end = 0, 0
        while end + len(turns[whole]) <= place:
            end += len(turns[whole])
            whole += 1
        assert check_legal(recording, bytes(content), before) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_controller_decides_what_the_first_one_did(kind):
    recording = recorded(kind, 1)
    places = sorted(recording.snapshots)
    first = recording.restored(0)
    for before, after in zip(places, [*places[1:], len(recording.turns)], strict=True):
        again = recording.restored(before)
        for turn in recording.turns[before:after]:
            ((_, records),) = read_turns(turn)
            expected = [actions for _, actions in replayed(first.handle, decode_events(records))]
            found = [actions for _, actions in replayed(again.handle, decode_events(records))]
            assert msgspec.msgpack.encode(found) == msgspec.msgpack.encode(expected)


@pytest.mark.parametrize("seed", range(4))
def test_clients_do_not_notice_that_the_controller_is_another_one(seed):
    world, recording = world_of(seed, MigratingWorld if seed % 2 else World)
    rng = random.Random(seed)
    for _ in range(60):
        act(world)
        if rng.random() < 0.2:
            controller = recording.restored(len(recording.turns))
            done = max(recording.snapshots)
            for turn in recording.turns[done:]:
                ((_, records),) = read_turns(turn)
                for _ in replayed(controller.handle, decode_events(records)):
                    pass
            recording.controller = controller
            if rng.random() < 0.5:
                recording.snapshot()
            world.cluster.event(e.Restarted(world.now, 2))
    world.settle()
    assert contradictions(recording.controller) == []
    assert len(recording.snapshots) > 1
