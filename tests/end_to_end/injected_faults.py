"""Faults for a cluster and a script that trains on it: parts of them are killed in turn."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.end_to_end.lost_controller import answers, controller, controller_of, taken_over
from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.standing_cluster import StandingCluster
from tests.forked_process import children

_READY_SECONDS = 120.0
CONTROLLER = "controller"
STANDBY = "controller with a standby"
WORKER = "worker"
AGENT = "host agent"
PROXY = "proxy"


class InjectedFaults:
    """Kills parts of a cluster and of a script in turn.

    The method of each kind of fault returns the time of the fault.
    """

    def __init__(self, cluster: StandingCluster, script: RemotePython, directory: Path) -> None:
        self._cluster = cluster
        self._script = script
        self._directory = directory
        self._present = controller(cluster)
        self._count = 0
        self._islands = itertools.cycle((0, 1))
        self._kinds: dict[str, Callable[[], float]] = {
            CONTROLLER: self._kill_controller,
            STANDBY: self._kill_controller_with_standby,
            WORKER: self._kill_worker,
            AGENT: self._kill_agent,
            PROXY: self._kill_proxy,
        }

    def hit_its_cluster(self) -> bool:
        """Return whether the script has its session on this cluster."""
        return [each["label"] for each in self._cluster.report()["sessions"]] == ["remote_python.py"]

    def inject(self, kind: str) -> float:
        return self._kinds[kind]()

    def _kill_controller(self) -> float:
        injected = time.monotonic()
        engine = self._present.parent()
        assert engine is not None
        self._present.kill()
        answers(self._cluster)
        self._present = controller_of(engine)
        return injected

    def _kill_controller_with_standby(self) -> float:
        self._count += 1
        engine = self._cluster.start_standby(self._directory / f"standby-{self._count}")
        injected = time.monotonic()
        self._present.kill()
        taken_over(self._cluster)
        self._present = controller_of(engine)
        return injected

    def _kill_worker(self) -> float:
        """Kill a worker, of another island each time, when all islands work.

        A script that loses both islands cannot continue.
        """
        island = next(self._islands)
        pid = self._ready()[island]["hosts"][0]["pid"]
        injected = time.monotonic()
        psutil.Process(pid).kill()
        return injected

    def _kill_agent(self) -> float:
        """Kill an agent, of another island each time. Its worker ends with it, and the agent is restarted."""
        island = next(self._islands)
        self._ready()
        injected = time.monotonic()
        self._cluster.agents[island].process().kill()
        return injected

    def _kill_proxy(self) -> float:
        """Kill the script's proxy, which is its child process."""
        injected = time.monotonic()
        proxies = (each for each in children(self._script.pid) if "atoll.ifrt.proxy_main" in each.cmdline())
        next(proxies).kill()
        return injected

    def _ready(self) -> list[dict[str, list[dict[str, int]]]]:
        report = self._cluster.until(
            lambda report: all(each["state"] == "ready" for each in report["islands"]), _READY_SECONDS
        )
        islands: list[dict[str, list[dict[str, int]]]] = report["islands"]
        return islands


@dataclass(frozen=True)
class Interruption:
    """Time in seconds for which a fault interrupted a training."""

    kind: str
    at: float
    seconds: float


def interruptions(
    injected: Sequence[tuple[str, float]], known: Sequence[float], pause: float
) -> Iterator[Interruption]:
    """Return the interruption by each fault: the longest time between two steps around it, minus the usual pause.

    `known` contains the times at which the loss of each step was known. A period that contains two faults counts for
    the second one, unless it contains both entirely.
    """
    for (kind, when), (_, end) in itertools.pairwise([*injected, ("", float("inf"))]):
        steps = itertools.pairwise(known)
        gaps = [after - before for before, after in steps if after > when and (after < end or before < when)]
        yield Interruption(kind, when, max(gaps, default=pause) - pause)


def table(found: Sequence[Interruption]) -> str:
    """Return a line for each kind of fault with the median and the maximum."""
    seconds: dict[str, list[float]] = {}
    for each in found:
        seconds.setdefault(each.kind, []).append(each.seconds)
    return "\n".join(
        f"{kind:26} {len(those):2} times, {statistics.median(those):5.2f} s, {max(those):5.2f} s at most"
        for kind, those in seconds.items()
    )
