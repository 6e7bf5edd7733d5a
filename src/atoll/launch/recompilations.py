"""Have launches wait for functions that hosts compile again: after the restart of an island, or the loss of a function.

`Island.needs_recompile` has the functions that each session lacks on an island. Until it has them again, the session's
nodes that run one of them there wait. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from atoll.cluster.lifecycle import Island, IslandFailed
from atoll.launch.scheduler import Scheduler
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.compiled_functions import FunctionRegistry, Registration, hosts_of, islands_of
from atoll.state.session import GangRun, Session


class Recompilations:
    """The functions that sessions have had, and that hosts compile again."""

    def __init__(self, shared: SharedState, functions: FunctionRegistry, scheduler: Scheduler[GangRun]) -> None:
        self._functions = functions
        self._scheduler = scheduler
        self._resources = shared.resources
        self._sessions = shared.sessions
        self._outbox = shared.outbox

    def invalidate_island(self, session: Session, island: int) -> None:
        """Note that the hosts of a restarted island have to compile the session's functions again.

        A function that also runs on an island that does not work is compiled when that island has restarted.
        """
        groups = session.functions_on.items()
        names = set().union(*(some for islands, some in groups if self._are_compiled_again(islands, island)))
        if names:
            self._scheduler.island_leaves(island)
            self._resources.islands[island].needs_recompile[session.number] = names
            self._forget_failures(session, names)

    def _forget_failures(self, session: Session, names: Iterable[str]) -> None:
        """Have launches wait for functions that could not be compiled again, since they are compiled once more."""
        if session.failed_functions:
            for name in names:
                session.failed_functions.pop(name, None)

    def _are_compiled_again(self, islands: tuple[int, ...], restarted: int) -> bool:
        """Return whether functions on these islands run on the restarted one, and all of the islands work."""
        return restarted in islands and all(self._resources.islands[each].works for each in islands)

    def island_failed(self, failed: IslandFailed) -> None:
        """Do not wait for functions of the island: they are compiled again when it has restarted."""
        island = failed.island
        self._functions.stop_waiting(self._repeated_on(island))
        self._resources.islands[island].needs_recompile.clear()
        for other in self._resources.islands.values():
            for number, names in list(other.needs_recompile.items()):
                groups = self._sessions[number].functions_on.items()
                lost = set().union(*(names & some for islands, some in groups if island in islands))
                self._not_needed(other, number, lost)

    def _repeated_on(self, island: int) -> list[Registration]:
        """Return what sessions wait for that have had their functions before, of those on the island.

        Functions that are compiled for a migration are not among them: the migration fails.
        """
        waiting = [each for some in self._functions.waiting.values() for each in some if each.is_repeated]
        return [
            each
            for each in waiting
            if island in islands_of(self._functions.locations.get(each.name, ()))
            and (session := self._sessions.get(each.session)) is not None
            and session.migrating.get(each.function) != each.name
        ]

    def request_again(self, lost: Collection[str]) -> dict[int, set[str]]:
        """Have sessions send the sources again of functions that their hosts have lost. Launches wait for that.

        Return those of the functions that are being compiled, by session: these fail. Functions that run on each island
        by itself do not fail.
        """
        awaited: dict[int, set[str]] = {}
        for (name, _), waiting in self._functions.waiting.items():
            report = self._functions.reports.get(name)
            if name in lost and not (report is not None and report.is_apart):
                for each in waiting:
                    awaited.setdefault(each.session, set()).add(name)
        for session in self._sessions.values():
            asked = []
            has_some = any(name in session.function_uses for name in lost)
            for function, name in session.functions.items() if has_some else ():
                if name in lost and name not in awaited.get(session.number, ()):
                    locations = self._functions.locations[name]
                    asked.append((function, tuple(sorted(hosts_of(locations)))))
                    for island in islands_of(locations):
                        self._scheduler.island_leaves(island)
                        needed = self._resources.islands[island].needs_recompile
                        needed.setdefault(session.number, set()).add(name)
            if asked:
                self._forget_failures(session, [session.functions[function] for function, _ in asked])
                self._outbox.to_session(session.number, m.SendSources(tuple(asked)))
        return awaited

    def ended(self, number: int, name: str) -> None:
        """Note that a function was compiled again, or is not needed. The session's nodes stop waiting for it."""
        for island in self._resources.islands.values():
            if number in island.needs_recompile:
                self._not_needed(island, number, {name})

    def _not_needed(self, island: Island, number: int, names: set[str]) -> None:
        needed = island.needs_recompile[number]
        if not names.isdisjoint(needed):
            needed -= names
            if needed:
                self._scheduler.functions_compiled(island.number, number)
            else:
                del island.needs_recompile[number]
                self._scheduler.offer_again(island.number)
