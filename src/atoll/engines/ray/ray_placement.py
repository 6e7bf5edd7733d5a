"""The engine's placement groups in Ray, one per island, with a host actor per bundle.

Calls to Ray may block, so a separate thread makes them. It periodically compares the wanted state with the actual one,
and restores what was killed. The engine process is Ray's driver: Ray removes everything when that process ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.cluster.processes.bugs import described
from atoll.engines.ray.actors import AgentEnd, HostActor
from atoll.engines.ray.bundles import Demand, lack_text
from atoll.engines.ray.ray_connection import connect, draining, nodes
from atoll.errors import AtollError
from atoll.retries import Reasons

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # between two comparisons
_RETRY_SECONDS = (0.0, 1.0, 2.0, 5.0, 15.0)  # until the restart of a host agent, by its number of failures
_WELL_SECONDS = 10.0  # run time of an agent after which the end of its predecessor is not reported any more
_STEADY_SECONDS = 60.0  # run time of an agent after which its end does not count as a failed start
_END_SECONDS = 3.0


@dataclass(eq=False)
class _Host:
    """The actor of one bundle. `ended` is Ray's reference to the end of its agent, None if no actor runs."""

    actor: Any = None
    ended: Any = None
    began: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    problem: str = ""


@dataclass(eq=False)
class _Group:
    """The placement group of an island, and its hosts by rank. `leaving` are the ranks on nodes that Ray drains."""

    group: Any
    demand: Demand
    hosts: list[_Host] = field(default_factory=list)
    leaving: frozenset[int] = frozenset()


class RayPlacement:
    """Keeps the wanted islands placed. Methods may be called from any thread, and only `close` blocks.

    Callbacks are called on the placement's thread.

    Args:
        address: Address of the Ray cluster; see `connect`.
        name: Prefix of the names of placement groups.
        arguments: Returns the arguments of `atoll host`, from the module `ray`, the island and the rank.
        environment: Variables that are added to those of the node.
        lease: Seconds after which a host agent that hangs is restarted.
        on_connected: Called when Ray is connected.
        on_change: Called when the `text` of an island has changed.
        on_leaving: Called repeatedly with (island, rank, seconds left) for a host on a node that Ray drains.
    """

    def __init__(
        self,
        address: str,
        name: str,
        arguments: Callable[[Any, int, int], list[str]],
        environment: Mapping[str, str],
        lease: float,
        on_connected: Callable[[], None],
        on_change: Callable[[], None],
        on_leaving: Callable[[int, int, float], None],
    ) -> None:
        self._texts: dict[int, str] = {}  # by island; replaced, never modified
        self._address = address
        self._name = name
        self._arguments = arguments
        self._environment = dict(environment)
        self._lease = lease
        self._on_connected = on_connected
        self._on_change = on_change
        self._on_leaving = on_leaving
        self._lock = threading.Lock()
        self._wanted: dict[int, Demand] = {}  # by island
        self._groups: dict[int, _Group] = {}
        self._awake = threading.Event()
        self._closing = False
        self._ray: Any = None
        self._problems = Reasons(_log)
        self._thread = threading.Thread(target=self._run, name="atoll-ray", daemon=True)

    def start(self) -> None:
        """Start the thread, which connects to Ray and then places the wanted islands."""
        self._thread.start()

    def want(self, island: int, demand: Demand) -> None:
        with self._lock:
            self._wanted[island] = demand
        self._awake.set()

    def drop(self, island: int) -> None:
        with self._lock:
            self._wanted.pop(island, None)
        self._awake.set()

    def text(self, island: int) -> str:
        """Return what Ray lacks for an island, or what it does for it; "" if nothing."""
        if self._ray is None:
            return self._texts.get(island, "not connected to Ray yet")
        return self._texts.get(island, "")

    def close(self) -> None:
        """Remove everything from Ray. Return when it is removed, or when Ray does not answer in time."""
        self._closing = True
        self._awake.set()
        if self._thread.is_alive():
            self._thread.join(3 * _END_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                if self._ray is None:
                    self._ray = connect(self._address)
                    self._on_connected()
                self._reconcile()
                self._problems.solved()
            except AtollError as error:
                self._set_texts(dict.fromkeys(self._wanted_now(), str(error)))
            except Exception as error:  # any of Ray's errors, such as while its head restarts
                text = f"a call to Ray failed: {described(error)}"
                self._problems.log(text)
                self._set_texts(dict.fromkeys(self._wanted_now(), text))
            self._awake.wait(_LOOK_SECONDS)
            self._awake.clear()
        if self._ray is not None:
            with contextlib.suppress(Exception):
                self._remove_all()
            self._ray.shutdown()

    def _reconcile(self) -> None:
        wanted = self._wanted_now()
        for island in [each for each in self._groups if each not in wanted]:
            self._remove(self._groups.pop(island))
        texts = {}
        leaving = draining(self._ray)
        for island, demand in wanted.items():
            group = self._groups.get(island)
            if group is None:
                group = self._groups[island] = self._make(island, demand)
            table = self._ray.util.placement_group_table(group.group)
            state: str = table.get("state", "REMOVED")
            self._look_at_nodes(island, group, table, leaving)
            self._note_ends(group)
            # Someone has removed the group, so Ray ends its actors. Or a host has left, so place it on nodes that stay.
            if state == "REMOVED" or any(group.hosts[rank].ended is None for rank in group.leaving):
                self._remove(self._groups.pop(island))
                continue
            self._start_hosts(island, group)
            texts[island] = self._text(group, state)
        self._set_texts(texts)

    def _wanted_now(self) -> dict[int, Demand]:
        with self._lock:
            return dict(sorted(self._wanted.items()))

    def _set_texts(self, texts: dict[int, str]) -> None:
        if texts != self._texts:
            self._texts = texts
            self._on_change()

    def _make(self, island: int, demand: Demand) -> _Group:
        labels = [dict(demand.labels)] * demand.count if demand.labels else None
        group = self._ray.util.placement_group(
            [dict(demand.bundle)] * demand.count,
            strategy=demand.strategy,
            name=f"{self._name}-island-{island}",
            bundle_label_selector=labels,
        )
        return _Group(group, demand, [_Host() for _ in range(demand.count)])

    def _look_at_nodes(
        self, island: int, group: _Group, table: Mapping[str, Any], leaving: Mapping[str, float]
    ) -> None:
        """Report the hosts on nodes that Ray drains. The agent of such a host may not have joined yet."""
        on = {rank: node for rank, node in table.get("bundles_to_node_id", {}).items() if node in leaving}
        group.leaving = frozenset(on)
        for rank, node in on.items():
            self._on_leaving(island, rank, leaving[node])

    def _note_ends(self, group: _Group) -> None:
        now = time.monotonic()
        running = {host.ended: host for host in group.hosts if host.ended is not None}
        ended, _ = self._ray.wait(list(running), num_returns=len(running), timeout=0) if running else ((), ())
        for reference in ended:
            self._host_ended(running[reference], now)

    def _start_hosts(self, island: int, group: _Group) -> None:
        now = time.monotonic()
        for rank, host in enumerate(group.hosts):
            if host.ended is not None and now - host.began > _WELL_SECONDS:
                host.problem = ""
            # Ray starts an actor only when its bundle is placed. It places all bundles of the group or none.
            if host.ended is None and now >= host.retry_at:
                self._start(island, rank, host, group)

    def _start(self, island: int, rank: int, host: _Host, group: _Group) -> None:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group.group, placement_group_bundle_index=rank
        )
        resources = dict(group.demand.bundle)
        options = {
            "num_cpus": resources.pop("CPU", 0.0),
            "num_gpus": resources.pop("GPU", 0.0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "scheduling_strategy": strategy,
        }
        actor = self._ray.remote(HostActor).options(**options).remote()
        host.actor, host.began = actor, time.monotonic()
        host.ended = actor.run.remote(self._arguments(self._ray, island, rank), self._environment, self._lease)

    def _host_ended(self, host: _Host, now: float) -> None:
        try:
            end = AgentEnd(*self._ray.get(host.ended))
            host.problem = f"its host agent ended with status {end.status}: {end.text}"
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            host.problem = f"its host actor ended: {type(error).__name__}: {first}"
        _log.warning("%s", host.problem)
        host.failures = 0 if now - host.began > _STEADY_SECONDS else min(host.failures + 1, len(_RETRY_SECONDS))
        host.retry_at = now + _RETRY_SECONDS[max(0, host.failures - 1)]
        self._end_actor(host)

    def _text(self, group: _Group, state: str) -> str:
        if state != "CREATED":
            return lack_text(group.demand, nodes(self._ray))
        problems = [f"rank {rank}: {host.problem}" for rank, host in enumerate(group.hosts) if host.problem]
        return "; ".join(problems) or "Ray has placed it, and starts its host agents"

    # ---- end

    def _end_actor(self, host: _Host) -> None:
        if host.actor is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(host.actor, no_restart=True)
        host.actor = host.ended = None

    def _remove(self, group: _Group) -> None:
        for host in group.hosts:
            self._end_actor(host)
        self._ray.util.remove_placement_group(group.group)

    def _remove_all(self) -> None:
        """Remove all groups. The cluster has dismissed its agents, so first give them time to end."""
        running = [host.ended for group in self._groups.values() for host in group.hosts if host.ended is not None]
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=_END_SECONDS)
        for group in self._groups.values():
            self._remove(group)
