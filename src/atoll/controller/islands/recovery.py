"""Islands that go and come back: who is told, what fails, what waits, and what is done again.

An island fails as a whole: the broken collectives of the hosts that are left cannot be mended.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.controller.durations import Durations
from atoll.controller.islands.resources import ResourceManager
from atoll.controller.outbox import Outbox
from atoll.controller.programs.compilation import Compilation
from atoll.controller.programs.failures import Failures
from atoll.controller.programs.launcher import Launcher
from atoll.controller.programs.quarantine import Quarantine
from atoll.controller.sessions.queries import Questions
from atoll.controller.sessions.session import Session
from atoll.errors import OK, Code, Status
from atoll.processes.leases import Leases
from atoll.protocol import messages as m

# For an island to be up again.
RESTART_SECONDS = 120.0
# For the other hosts of a gang to end, once it has failed on one of them.
HALF_FAILED_SECONDS = 5.0

_LOST = "what was stored or ran on its island is lost"


class Recovery:
    """Decides that an island is lost, and brings it back."""

    def __init__(
        self,
        resources: ResourceManager,
        sessions: dict[int, Session],
        outbox: Outbox,
        launcher: Launcher,
        failures: Failures,
        compilation: Compilation,
        questions: Questions,
        quarantine: Quarantine,
        leases: Leases,
    ) -> None:
        self._resources = resources
        self._sessions = sessions
        self._outbox = outbox
        self._launcher = launcher
        self._failures = failures
        self._compilation = compilation
        self._questions = questions
        self._quarantine = quarantine
        self._leases = leases
        self.on_lost: Callable[[int, Status], None] = lambda island, status: None
        self.on_given_up: Callable[[int, Status], None] = lambda island, status: None
        self._hanging: Durations[int] = Durations()  # gangs, by sequence
        self._restarting: Durations[int] = Durations()  # islands
        self._running_at_loss: dict[int, set[str]] = {}  # functions, by island

    # ---- hosts

    def worker_lost(self, host: int, reason: str) -> None:
        """The connection to a host's worker is gone."""
        record = self._resources.hosts[host]
        text = f"host {host} of island {record.island} is gone (worker {record.pid}: {reason})"
        self.island_lost(record.island, Status(Code.DATA_LOSS, f"{text}; {_LOST}"))

    def worker_ended(self, message: m.WorkerEnded) -> None:
        """The engine has seen a worker's end, which may have been the doing of what ran there."""
        record = self._resources.hosts.get(message.host)
        if record is None or record.pid != message.pid:
            return
        compiling = self._compilation.under_way(message.host)
        self.worker_lost(message.host, message.text)
        running = self._running_at_loss.pop(record.island, set())
        self._quarantine.crashed(message.status, message.text, running, compiling)
        self._compilation.refuse(self._quarantine.refused)

    def tick(self, now: float) -> None:
        """Once a second: looks for hosts that are silent, and for gangs and islands that hang."""
        for host in self._leases.expired(now):
            record = self._resources.hosts[host]
            self._restart(
                record.island,
                f"host {host} of island {record.island} has not answered for {self._leases.seconds:.0f} s "
                f"(worker {record.pid} is stopped, or its machine cannot be reached)",
            )
        hanging = {gang.sequence: gang for gang in self._failures.half_failed()}
        for sequence, seconds in self._hanging.update(now, hanging).items():
            gang = hanging[sequence]
            if seconds > HALF_FAILED_SECONDS:
                error = gang.run.failure or OK
                self._restart(
                    gang.island,
                    f"hosts {sorted(gang.run.hosts_left)} of island {gang.island} wait for another, where "
                    f"{gang.run.launch.program.name} failed: {error.message}",
                )
        restarting = [island.number for island in self._resources.islands.values() if island.state == "restarting"]
        for island, seconds in self._restarting.update(now, restarting).items():
            if seconds > RESTART_SECONDS:
                self.island_given_up(island, f"it was not up again within {RESTART_SECONDS:.0f} s")

    # ---- islands

    def _restart(self, island: int, reason: str) -> None:
        if self._resources.islands[island].state == "ready":
            self._outbox.to_engine(m.RestartIsland(island, reason))
            self.island_lost(island, Status(Code.DEADLINE_EXCEEDED, f"{reason}; its island is restarted, and {_LOST}"))

    def island_lost(self, island: int, status: Status) -> None:
        """A host of the island is gone, and so the island: what was there or would have run there fails.

        `status` says what befell which host. What needs the island from now on waits until it is back.
        """
        if self._resources.islands[island].state in ("restarting", "lost", "drained"):
            return
        self._running_at_loss[island] = self._failures.running(island)
        self._resources.lose(island, status)
        lost = set(self._resources.hosts_of(island))
        for host in lost:
            self._outbox.forget_host(host)
            self._leases.forget(host)
        self._failures.island_lost(island, status)
        for session in self._sessions.values():
            session.unseen[island] = status
            self._outbox.to_session(session.number, m.HostsLost(tuple(sorted(lost))))
            session.feeds.lose(lost)
            for handle, entry in list(session.directory.entries.items()):
                if lost.intersection(entry.hosts):
                    session.has_errors = True
                    self._launcher.memory.release(entry)
                    if not entry.ready:
                        self._launcher.settle(session, handle, status.within(entry.maker))
                    elif entry.error is None:
                        entry.error = status.within(entry.maker)
        self._failures.fail_doomed()
        self.on_lost(island, status)

    def island_back(self, island: int) -> None:
        """All hosts of an island that was restarted have joined: all sessions are told to go on."""
        for session in self._sessions.values():
            self._outbox.to_session(session.number, m.HostsBack(self._resources.addresses_of(island)))
            self._compilation.chill(session, island)
        self._launcher.island_back(island)
        self._questions.ask_again(set(self._resources.hosts_of(island)))

    def island_given_up(self, island: int, reason: str) -> None:
        """The island will not be back: what waits for it fails."""
        record = self._resources.islands[island]
        if record.state in ("lost", "drained"):
            return
        status = Status(Code.UNAVAILABLE, f"island {island} is gone for good: {reason}")
        if record.state == "ready":
            self.island_lost(island, status)
        record.state, record.last_failure = "lost", status
        self._failures.fail_waiting(island, status)
        hosts = set(self._resources.hosts_of(island))
        self._compilation.give_up(hosts, status)
        self._questions.give_up(hosts, status)
        self.on_given_up(island, status)
