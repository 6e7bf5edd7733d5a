"""Worlds of random clients whose controller is journaled, and then lost."""

from __future__ import annotations

import random
from typing import Any

from atoll.controller.controller_dumps import load_controller
from atoll.controller.core import Controller
from atoll.journal.records import encode_turn, join_records
from atoll.protocol import actions as a
from atoll.protocol import events as e
from tests.controller.dumps import dumped
from tests.controller.migrating_world import MigratingWorld
from tests.controller.world import World


class Recorded:
    """Controller whose turns are recorded. It replaces the controller of its world."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.turns: list[bytes] = []  # in the format of a journal
        self.snapshots: dict[int, bytes] = {0: dumped(controller)}  # by the number of turns before each

    def __getattr__(self, name: str) -> Any:
        return getattr(self.controller, name)

    def handle(self, event: e.AnyEvent) -> list[a.AnyAction]:
        actions = self.controller.handle(event)
        if type(event) is e.Flush:
            self.turns.append(encode_turn(join_records(self.controller.log.turn)))
        return actions

    def snapshot(self) -> None:
        self.snapshots[len(self.turns)] = dumped(self.controller)

    def restored(self, turns: int) -> Controller:
        """Return the state restored from the last snapshot before this number of turns."""
        controller: Controller = load_controller(self.snapshots[max(each for each in self.snapshots if each <= turns)])
        return controller


def world_of(seed: int, kind: type[World] = World, doom: float = 0.1) -> tuple[World, Recorded]:
    """Return a world with three clients. Its controller is recorded after all hosts have joined."""
    rng = random.Random(seed)
    world = kind(rng, rng.choice(["2x1x2", "1x2x2", "3x1x1"]), doom, device_memory=rng.choice([0, 100]))
    del world.controller.launches.reservations.waits.hopeless  # the world's own check, which only knows this controller
    recorded = Recorded(world.controller)
    world.controller = world.cluster.controller = recorded  # type: ignore[assignment]
    for _ in range(3):
        world.open()
    return world, recorded


def act(world: World) -> None:
    """Let a random event happen."""
    rng = world.rng
    if rng.random() < 0.7:
        rng.choice(list(world.clients.values())).act()
        world.deliver()
    elif type(world) is World and rng.random() < 0.05 and not world.down:
        world.lose(rng.choice(sorted(world.controller.resources.islands)))
    elif isinstance(world, MigratingWorld) and rng.random() < 0.3:
        (world.suspend if rng.random() < 0.2 else world.move)()
    else:
        world.work()
