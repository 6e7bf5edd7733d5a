"""Random clients on a cluster whose operator also drains islands, and whose controller is replaced by its standby."""

from __future__ import annotations

import random
from typing import Any

from atoll.cluster.lifecycle import IslandState
from atoll.errors import Code, Status
from atoll.protocol import events as e
from atoll.protocol import messages as m
from tests.controller.dumps import check_dump
from tests.controller.migrating_world import MigratingClient, MigratingWorld
from tests.controller.play import Cluster
from tests.controller.world import World


class OperatedClient(MigratingClient):
    """Client that may leave islands that are drained by itself: it releases its arrays there."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.leaves = self.rng.random() < 0.3
        if self.leaves:
            self.send(m.LeavesIslands())

    def may_fail(self, status: Status) -> bool:
        return status.code == Code.DATA_LOSS and "was drained" in status.message

    def handle(self, message: Any) -> None:
        if isinstance(message, m.HostsLeave) and not message.stay:
            assert self.leaves
            for handle, spec in sorted(self.arrays.items()):
                if any(self.locations[device].host in message.hosts for device in spec.sharding.devices):
                    self.release(handle)
        super().handle(message)


class OperatedCluster(Cluster):
    """Cluster where other events occur between the flushes that do work in steps. `rng` is None at the end."""

    rng: random.Random | None = None

    def next_flush(self) -> e.Flush:
        return e.Flush(self.now) if self.rng is None else e.Flush(self.now, self.rng.choice([1, 4, 64]))

    def pauses(self) -> bool:
        return self.rng is not None and self.rng.random() < 0.5


class OperatedWorld(MigratingWorld):
    """World with an operator who moves, suspends and drains, and with a standby of the controller."""

    kind_of_client = OperatedClient
    kind_of_cluster = OperatedCluster
    shares = True

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.incarnation = 0
        assert isinstance(self.cluster, OperatedCluster)
        self.cluster.rng = self.rng

    def drain(self) -> None:
        """Drain an island, or let a drained one start again."""
        islands = self.controller.resources.islands
        self.ask(m.DrainRequest(self.rng.choice(list(islands)), returns=self.rng.random() < 0.3))

    def undrain(self) -> None:
        drained = [each.number for each in self.controller.resources.islands.values() if each.is_drained]
        if drained:
            self.ask(m.UndrainRequest(self.rng.choice(drained)))

    def take_over(self) -> None:
        """Replace the controller by one that was loaded from its dump."""
        self.deliver()
        self.controller = self.cluster.controller = check_dump(self.controller)
        self._hopeless = self.controller.launches.reservations.waits.hopeless
        self.controller.launches.reservations.waits.hopeless = self.hopeless  # type: ignore[method-assign]

    def ask_engine(self, message: Any) -> None:
        super().ask_engine(message)
        if isinstance(message, m.EndIsland):
            self.end(message.island)
            self.removed.add(message.island)
            self.cluster.engine(m.IslandEnded(message.island))
        elif isinstance(message, m.StartIsland):
            self.incarnation += 1
            self.removed.discard(message.island)
            self.cluster.engine(m.IslandStarts(message.island, self.incarnation))

    def act(self) -> None:
        """Let the operator or the standby act."""
        self.rng.choice([self.move, self.suspend, self.drain, self.undrain, self.take_over])()

    def lose_one(self) -> None:
        """Lose an island that works, if there is one."""
        works = [each.number for each in self.controller.resources.islands.values() if each.works]
        if works:
            self.lose(self.rng.choice(works))

    def pass_time(self) -> None:
        self.now += 1
        self.cluster.tick(self.now)
        self.deliver()

    def settle(self) -> None:
        assert isinstance(self.cluster, OperatedCluster)
        self.cluster.rng = None
        super().settle()
        for _ in range(400):
            if not any(each.state is IslandState.DRAINING for each in self.controller.resources.islands.values()):
                break
            self.pass_time()
            super().settle()
        states = {each.state for each in self.controller.resources.islands.values()}
        assert states <= {IslandState.READY, IslandState.DRAINED, IslandState.REMOVED}, states
