"""A cluster without processes that records its events and its gangs."""

from __future__ import annotations

from typing import Any

from atoll.controller.core import Controller
from atoll.errors import AtollError
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.security.tokens import digest
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang, story
from atoll.state.session import GangRun
from tests.controller.play import Cluster


class RecordedCluster(Cluster):
    """Cluster that records its events, and the gangs that wait or run after each event."""

    def __init__(self, topology: str, token: str = "", **settings: Any) -> None:
        self.recorded: list[e.AnyEvent] = []
        self.term = 1
        self._gangs: dict[int, Gang[GangRun]] = {}
        self._told: dict[int, list[str]] = {}  # states that `transitions` has returned, by gang
        self._standby: Controller | None = None
        super().__init__(topology, token, **settings)

    def event(self, event: e.AnyEvent) -> list[a.AnyAction]:
        self.recorded.append(event)
        actions = super().event(event)
        if self._standby is not None:
            assert self._standby.handle(event) == actions, "the same events lead to the same actions"
        self._find_gangs()
        return actions

    def _find_gangs(self) -> None:
        launches = self.controller.launches
        waiting = (node for island in self.controller.resources.islands for node in launches.scheduler.nodes(island))
        for gang in [*launches.in_flight.values(), *(each for node in waiting for each in node.gangs)]:
            self._gangs[gang.sequence] = gang

    def restart(self) -> None:
        """Continue with a controller that has handled all events again."""
        self._continue_with(self._replayed())

    def start_standby(self) -> None:
        """Start a controller that handles the same events from now on."""
        self._standby = self._replayed()

    def take_over(self) -> None:
        """Continue with the standby."""
        standby, self._standby = self._standby, None
        assert standby is not None
        self._continue_with(standby)

    def _replayed(self) -> Controller:
        controller = Controller(self.controller.settings, digest(self.token))
        for event in self.recorded:
            try:
                controller.handle(event)
            except AtollError:
                """As in the original run."""
        return controller

    def _continue_with(self, controller: Controller) -> None:
        """Connect all peers to another controller."""
        self.controller = controller
        self.term += 1
        self._gangs.clear()
        self.event(e.Restarted(self.now, self.term))
        peers = sorted(self._names)
        for kind in (e.ConnectionAway, e.ConnectionBack):
            for connection in peers:
                self.event(kind(self.now, connection))

    def transitions(self) -> list[tuple[Gang[GangRun], bool, list[str]]]:
        """Return the gangs whose states have changed since the last call, with the new states.

        Finished gangs are first. The flag is true for new gangs.
        """
        found = []
        for sequence, gang in sorted(self._gangs.items(), key=lambda each: (not each[1].is_over, each[0])):
            before, now = self._told.get(sequence, []), _states(gang)
            if now != before:
                found.append((gang, sequence not in self._told, now[len(before) :] or now[-1:]))
                self._told[sequence] = now
            if gang.is_over:
                del self._gangs[sequence]
        return found


def _states(gang: Gang[GangRun]) -> list[str]:
    """Return the states of a gang so far, with the reasons to wait, as recorded in its `story`."""
    states = []
    for step in story(gang):
        waits = step.state in (GangState.WAITING, GangState.DEFERRED)
        state = f"{step.state.name} ({step.reason})" if waits else step.state.name
        if [state] != states[-1:]:
            states.append(state)
    if gang.is_over and states[-1] != gang.state.name:
        states.append(gang.state.name)
    return states
