"""A scheduler whose islands fail, restart, and lack functions as the test requests."""

from __future__ import annotations

from typing import Any

from atoll.cluster.lifecycle import Island, IslandState
from atoll.launch import scheduler
from atoll.state.queued_nodes import Payload


class Scheduler(scheduler.Scheduler[Payload]):
    """A scheduler of `islands` islands that work."""

    def __init__(self, islands: int, *args: Any, **options: Any) -> None:
        self.records = [Island(number, IslandState.READY) for number in range(islands)]
        super().__init__(self.records, *args, **options)

    def pause(self, island: int) -> None:
        """Let the island fail."""
        self.island_leaves(island)
        self.records[island].enter(IslandState.RESTARTING)

    def resume(self, island: int) -> None:
        self.records[island].enter(IslandState.READY)
        self.offer_again(island)

    def exclude(self, island: int, session: int) -> None:
        """Let the session lack a function on the island."""
        self.island_leaves(island)
        self.records[island].needs_recompile[session] = {"a function"}

    def admit(self, island: int, session: int) -> None:
        self.records[island].needs_recompile.pop(session, None)
        self.offer_again(island)
