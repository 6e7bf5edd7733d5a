"""What is done to a cluster, and to a script on it, while the script trains: parts of them are killed in turn."""

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
    """Kills parts of a cluster and of a script in turn. Each kind of fault returns when it was done."""

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
        """Whether the script has its session there."""
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
        """That of each island in turn, once all are there: who loses both has nothing left to go on with."""
        island = next(self._islands)
        pid = self._ready()[island]["hosts"][0]["pid"]
        injected = time.monotonic()
        psutil.Process(pid).kill()
        return injected

    def _kill_agent(self) -> float:
        """That of each island in turn; its worker ends with it, and it is started again."""
        island = next(self._islands)
        self._ready()
        injected = time.monotonic()
        self._cluster.agents[island].process().kill()
        return injected

    def _kill_proxy(self) -> float:
        """The script's own, which is its child."""
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
    """For how long a training stood still for a fault, in seconds."""

    kind: str
    at: float
    seconds: float


def interruptions(
    injected: Sequence[tuple[str, float]], known: Sequence[float], pause: float
) -> Iterator[Interruption]:
    """Of each fault the longest time between two steps from just before it to the next one, beyond the pause that is
    between any two. `known` is when each step's loss was known. A time with the next fault in it is that one's, unless
    it has both in it."""
    for (kind, when), (_, end) in itertools.pairwise([*injected, ("", float("inf"))]):
        steps = itertools.pairwise(known)
        gaps = [after - before for before, after in steps if after > when and (after < end or before < when)]
        yield Interruption(kind, when, max(gaps, default=pause) - pause)


def table(found: Sequence[Interruption]) -> str:
    """Median and worst of each kind, a line each."""
    seconds: dict[str, list[float]] = {}
    for each in found:
        seconds.setdefault(each.kind, []).append(each.seconds)
    return "\n".join(
        f"{kind:26} {len(those):2} times, {statistics.median(those):5.2f} s, {max(those):5.2f} s at most"
        for kind, those in seconds.items()
    )
