"""The engine `ray`: the engine `hosts` with host agents that Ray starts.

Ray finds nodes for an island, all or none, and starts an agent on each, for that island and rank. Agents, workers and
clients then communicate without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from atoll.cluster.topology import IslandShape
from atoll.engines.engine_interface import HostStart
from atoll.engines.engine_options import EngineOptions
from atoll.engines.hosts.hosts_engine import HostsEngine
from atoll.engines.ray.actors import agent_environment
from atoll.engines.ray.bundles import demand_of
from atoll.engines.ray.ray_connection import keep_sigterm, reachable
from atoll.engines.ray.ray_placement import RayPlacement
from atoll.errors import ClusterError
from atoll.protocol import messages as m
from atoll.wire.address import parse_address


class RayEngine(HostsEngine):
    """The engine for Ray clusters."""

    def __init__(self, options: EngineOptions) -> None:
        self._controller = parse_address(options.controller_address)
        if self._controller.is_unix:
            raise ClusterError("a cluster on Ray cannot be embedded: start it with `atoll up --engine ray`")
        super().__init__(options)
        self._loop: asyncio.AbstractEventLoop | None = None  # before `begin`, the placement has no thread
        self._placement = RayPlacement(
            options.settings.ray_address,
            f"atoll-{self._controller.host}-{self._controller.port}",
            self._arguments,
            agent_environment(self._controller.tls),
            options.settings.lease_seconds,
            lambda: self._in_loop(keep_sigterm),
            lambda: self._in_loop(self._report),
            lambda island, rank, seconds: self._in_loop(partial(self.host_leaves, island, rank, seconds)),
        )

    def begin(self, send: Callable[[m.Message], None]) -> None:
        is_first = not self._has_begun
        super().begin(send)
        if is_first:
            self._loop = asyncio.get_running_loop()
            self._placement.start()

    def _in_loop(self, call: Callable[[], None]) -> None:
        """Make a call of the placement's thread on the event loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)

    def _arguments(self, ray: Any, island: int, rank: int) -> list[str]:
        address = reachable(self._controller, ray.util.get_node_ip_address())
        rank_slot = ["--address", str(address), "--island", str(island), "--rank", str(rank)]
        return rank_slot if address.tls else [*rank_slot, "--insecure"]

    def place(self, island: int, starts: Sequence[HostStart], then: Callable[[Sequence[str]], None]) -> None:
        first = starts[0]
        shape = IslandShape(first.hosts, first.devices, first.platform)
        self._placement.want(island, demand_of(self._settings, shape))
        super().place(island, starts, then)

    def release(self, island: int) -> None:
        super().release(island)
        self._placement.drop(island)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._placement.close)

    def _waits(self) -> list[tuple[int, str]]:
        texts = ((island, text, self._placement.text(island)) for island, text in super()._waits())
        return [(island, f"{text}; {of_ray}" if of_ray else text) for island, text, of_ray in texts]
