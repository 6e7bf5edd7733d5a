"""Which launches outlive the failure of an island, and why the others do not.

A launch outlives it if everything that it needs still exists, and if it had not started:

- No argument was stored on the island, except results of other launches that outlive it, which are made again.
- Bytes that the client sends to the island's hosts come again: its proxy confirms that when it acknowledges the loss.
- It waits in line, or all of it was sent to this island, and none of its gangs had ended or could have been running.
  Of the gangs in flight on a device, the first could have been running; the others waited behind it.

A launch that waits in line stays there. A launch that was sent joins the lines again, at the place that it had, before
its session's later launches. It takes part in no transfer to another island, so no other host knows of it. Of what was
sent, launches that call Python or are part of control flow do not outlive the loss.

A delegated run was sent to several islands at once. It may outlive the loss if it stood behind another one on the
island. `dependencies.delegated_runs` asks the hosts of its other islands, and it joins the lines if none of them has
begun it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from atoll.cluster.locations import HostDevice
from atoll.scheduling.buffer_directory import Entry
from atoll.scheduling.queued_nodes import Gang
from atoll.scheduling.session import GangRun, Launch, Session


class Survivors:
    """The launches that outlive the failure of one island.

    Args:
      island: the island.
      hosts: its hosts.
      in_flight: all gangs that are in flight, in the order in which they were started.
      sessions: all sessions, by number.
      has_begun: whether hosts of an island may have begun a launch that they run by themselves.
    """

    def __init__(
        self,
        island: int,
        hosts: set[int],
        in_flight: Mapping[int, Gang[GangRun]],
        sessions: Mapping[int, Session],
        has_begun: Callable[[Launch, int], bool],
    ) -> None:
        self.waiting: list[Launch] = []  # in line
        self.sent: list[Launch] = []  # to the island
        self.granted: list[Launch] = []  # to hosts that run them by themselves, and may not have begun
        self.lost: list[tuple[Launch, str]] = []  # with the reason
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

    def _find_running(self) -> set[int]:
        """Return the sequence numbers of gangs that may have been running on the island."""
        taken: set[HostDevice] = set()
        running = set()
        for gang in self._in_flight.values():
            if gang.island == self._island and not gang.run.spec.host_call:
                devices = {(host, each) for host, some in gang.run.spec.devices.items() for each in some}
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
        if launch.then is not None:
            return "its array was on its way back from the memory of a host"
        known = set(session.functions.values())
        if not known.issuperset(program.functions):
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
    """Return what the array is, and the program that has made it, as far as that is known."""
    if entry.spec is None:
        return ""
    shape = ",".join(map(str, entry.spec.shape))
    return f", {entry.spec.dtype}[{shape}]{entry.producer and f' made by {entry.producer}'},"
