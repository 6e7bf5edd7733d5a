"""Decide which launches survive the failure of an island, and why the others do not. `failures` has the rules. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from atoll.cluster.locations import HostDevice
from atoll.protocol.number_ranges import SPILL_FEEDS
from atoll.state.buffer_directory import Entry
from atoll.state.gang_specs import GangSpec
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Launch, Session

# Functions that the error of a failed launch names.
MAX_NAMED = 8


class Survivors:
    """The launches that survive the failure of one island.

    Args:
      island: the island.
      hosts: its hosts.
      in_flight: all gangs in flight, in the order in which they were started.
      sessions: all sessions, by number.
      has_begun: returns whether the host of an island may have begun a delegated launch.
    """

    def __init__(
        self,
        island: int,
        hosts: set[int],
        in_flight: Mapping[int, Gang[GangRun]],
        sessions: Mapping[int, Session],
        has_begun: Callable[[Launch, int], bool],
    ) -> None:
        self.waiting: list[Launch] = []  # survive in line
        self.sent: list[Launch] = []  # survive, and were sent to the island
        self.granted: list[Launch] = []  # delegated, and survive if no host has begun them
        self.lost: list[tuple[Launch, str]] = []  # do not survive, with the reason
        self._island = island
        self._hosts = hosts
        self._in_flight = in_flight
        self._sessions = sessions
        self._has_begun = has_begun
        self._running = self._find_running()
        self._remade: set[int] = set()  # ids of entries

    def judge(self, launches: Iterable[Launch]) -> None:
        """Decide which of these launches survive. An earlier launch of a session comes before a later one."""
        for launch in launches:
            was_sent = any(not node.is_pending for node in launch.nodes)
            was_sent = was_sent or bool(launch.hosts_started)
            reason = self._loss(launch, was_sent)
            if reason:
                self.lost.append((launch, reason))
                continue
            group = self.waiting if not was_sent else self.granted if launch.is_delegated else self.sent
            group.append(launch)
            self._remade.update(map(id, launch.entries[launch.program.arguments :]))

    def will_make(self, entry: object) -> bool:
        """Return whether a launch that survives makes this buffer."""
        return id(entry) in self._remade

    def described_run(self, launch: Launch) -> str:
        """Return text about the functions of a launch of several nodes that may not have ended on the island.

        The hosts of a delegated launch do not report each gang, so none of its functions may have ended.
        """
        if len(launch.program.nodes) < 2:
            return ""
        if launch.is_delegated:
            specs = launch.program.gangs
        else:
            gangs = (gang for node in launch.nodes for gang in node.gangs)
            specs = [gang.run.spec for gang in gangs if not gang.is_over]
        titles = list(dict.fromkeys(each.title for each in specs if each.title and self._is_here(each)))
        if not titles:
            return ""
        more = f" or {len(titles) - MAX_NAMED} others" if len(titles) > MAX_NAMED else ""
        return f" ({', '.join(titles[:MAX_NAMED])}{more} may not have ended there)"

    def _is_here(self, spec: GangSpec) -> bool:
        return not self._hosts.isdisjoint(spec.hosts)

    def _find_running(self) -> set[int]:
        """Return the sequence numbers of gangs that may have been running on the island."""
        taken: set[HostDevice] = set()
        running = set()
        for gang in self._in_flight.values():
            hosts = self._hosts & gang.run.hosts_left
            if hosts and not gang.run.spec.host_call:
                of_host = gang.run.spec.devices
                devices = {(host, each) for host in hosts.intersection(of_host) for each in of_host[host]}
                if taken.isdisjoint(devices):
                    running.add(gang.sequence)
                taken |= devices
        return running

    def _loss(self, launch: Launch, was_sent: bool) -> str:
        """Return why the launch does not survive; "" if it does."""
        session, program = self._sessions.get(launch.session), launch.program
        if session is None or not session.waits_for_islands:
            return "its session does not wait for the island"
        for number, entry in enumerate(launch.entries[: program.arguments]):
            if not self._hosts.isdisjoint(entry.hosts) and id(entry) not in self._remade:
                return f"its argument {number}{_described(entry)} was stored there"
        if any(feed in SPILL_FEEDS for feed in launch.feeds):
            return "its array was on its way back from the memory of a host"
        if not all(name in session.function_uses for name in program.functions):
            return "a function of it was released"
        if not was_sent:
            return ""
        if launch.is_delegated:
            sequences = {gang.sequence for node in launch.nodes for gang in node.gangs}
            may_run = self._has_begun(launch, self._island) or not self._running.isdisjoint(sequences)
            return "its hosts had started it" if may_run else ""
        return self._loss_of_sent(session, launch)

    def _loss_of_sent(self, session: Session, launch: Launch) -> str:
        program = launch.program
        if program.islands != (self._island,):
            return "hosts of other islands may have begun it"
        if program.is_unbounded or launch.dependency is not None or launch.part_of is not None:
            return "it was sent there, and depends on Python or on data"
        for gang in (gang for node in launch.nodes for gang in node.gangs):
            left = gang.run.hosts_left
            if not gang.is_unsent and (
                gang.sequence in self._running or gang.sequence not in self._in_flight or len(left) < len(gang.hosts)
            ):
                return "it had started there"
        if program.released and not program.waiting:
            return "its program was released"
        found = session.directory.entries
        if any(found.get(handle, entry) is not entry for handle, entry in launch.named_entries()):
            return "a handle of it was released, and is in use again"
        return ""


def _described(entry: Entry) -> str:
    """Return text about the shape of an array and the program that has made it, as far as these are known."""
    if entry.spec is None:
        return ""
    shape = ",".join(map(str, entry.spec.shape))
    return f", {entry.spec.dtype}[{shape}]{entry.producer and f' made by {entry.producer}'},"
