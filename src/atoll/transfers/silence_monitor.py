"""Finds peers that have gone silent while something is under way, on connections between machines.

TCP alone tells nothing for many minutes after a link has been cut. So what is under way is watched: as long as bytes
come in, or the peer's machine acknowledges what was sent, all is well; else the peer is asked, once a second, whether
it is there. An idle connection costs nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

from atoll.cluster.processes.leases import LEASE_SECONDS

# Of a host, unless the cluster has another lease.
SILENCE_SECONDS = LEASE_SECONDS
PERIOD_SECONDS = 1.0


class Watched(Protocol):
    """A connection. The monitor's thread calls these, one after the other for all connections: none may block."""

    patience: float  # seconds of silence

    def is_under_way(self) -> bool:
        """Whether anything is awaited of the peer."""

    def progress(self) -> object:
        """Differs from what it was where the peer has done anything since."""

    def probe(self) -> None:
        """Asks the peer to do something."""

    def peer_is_silent(self, seconds: float) -> None:
        """The peer has done nothing for so long: called once."""


@dataclass(slots=True)
class _State:
    progress: object
    since: float


class SilenceMonitor:
    """For any thread. Its thread runs while anything is watched."""

    def __init__(self, period: float = PERIOD_SECONDS) -> None:
        self.period = period
        self._lock = threading.Lock()
        self._watched: dict[Watched, _State] = {}
        self._runs = False

    def watch(self, connection: Watched) -> None:
        """Watches the connection from now on, for as long as something is under way."""
        if connection in self._watched:
            return
        with self._lock:
            self._watched.setdefault(connection, _State(None, time.monotonic()))
            starts, self._runs = not self._runs, True
        if starts:
            threading.Thread(target=self._run, name="atoll-silence", daemon=True).start()

    def _run(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(self.period)
            # As long as this machine was suspended, or this process stopped, what peers have sent was not read.
            away = time.monotonic() - before - self.period
            with self._lock:
                if not self._watched:
                    self._runs = False
                    return
                watched = list(self._watched.items())
                if away > self.period / 2:
                    for _, state in watched:
                        state.since += away
            for connection, state in watched:
                self._look(connection, state, time.monotonic())

    def _look(self, connection: Watched, state: _State, now: float) -> None:
        if not connection.is_under_way():
            with self._lock:
                self._watched.pop(connection, None)
            if connection.is_under_way():  # since then: who began it may have found it watched
                self.watch(connection)
            return
        progress = connection.progress()
        if progress != state.progress:
            state.progress, state.since = progress, now
        elif now - state.since >= connection.patience:
            with self._lock:
                self._watched.pop(connection, None)
            connection.peer_is_silent(now - state.since)
            return
        connection.probe()


# The process's own.
MONITOR = SilenceMonitor()
