"""Weights of Tunix from a trainer to its rollout workers, as named arrays of Atoll.

Tunix's `WeightSyncCoordinator` drives a round over a source (the trainer), destinations (the rollout workers) and a
transport. This module has all three::

    registry.register(TrainerWorker(...))  # calls a `WeightSource`
    registry.register(RolloutWorker(...))  # calls a `WeightDestination`
    coordinator = WeightSyncCoordinator(registry, AtollHandler())
    await coordinator.sync(policy_version=step)

The source publishes the parameters. A destination subscribes to exactly this version, on its own mesh and with its own
shardings, into arrays beside the ones that it serves. The devices of the trainer send to the devices of the worker. No
bytes pass through the coordinator.

Needs a version of Tunix with `tunix.experimental.orchestrator.weight_sync`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import jax
from tunix.experimental.orchestrator.weight_sync import (
    TensorMetadata,
    TransferResult,
    WeightSyncHandler,
    WorkUnitId,
    WorkUnitMetadata,
)
from tunix.experimental.orchestrator.weight_sync_coordinator import WorkerRoundTracker

from atoll.arrays import publish, subscribe
from atoll.errors import AtollError

__all__ = ["AtollHandler", "WeightDestination", "WeightSource"]

Pause = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    """Pause or resume a worker that serves only between rounds."""


class AtollHandler(WeightSyncHandler):  # type: ignore[misc]  # Tunix is not installed for type checks
    """The transport of a `WeightSyncCoordinator`. Destinations read the published version themselves."""

    def __init__(self) -> None:
        self._units: dict[Any, Any] = {}

    def register_work_unit(self, metadata: Any) -> None:
        self._units[metadata.unit] = metadata

    def transfer(
        self,
        src_units: Sequence[Any],
        dst_units: Sequence[Any],
        req_id: str | None = None,
        generation: int | None = None,
    ) -> Any:
        """Return success: the version is published, and destinations read it in `weight_sync`."""
        del generation
        missing = [each for each in (*src_units, *dst_units) if each not in self._units]
        if missing:
            return TransferResult(req_id or "", False, f"these work units are not registered: {missing}")
        return TransferResult(req_id or "", True)


class WeightSource:
    """The trainer's side of a round: publishes its parameters.

    Args:
      name: the name of the published arrays.
      params: returns the parameters as a tree of arrays.
      keep: number of versions that the name keeps. A destination that is more versions behind gets an error.
    """

    def __init__(self, name: str, params: Callable[[], Any], *, keep: int = 2) -> None:
        self.name = name
        self._params = params
        self._keep = keep

    async def prepare_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> Sequence[Any]:
        """Publish the parameters, and return their description with the number of the version."""
        del sync_request, kwargs
        params = self._params()
        version = await asyncio.to_thread(publish, self.name, params, keep=self._keep)
        unit = WorkUnitId(job_name="atoll", job_replica_id=str(version), data_name=self.name)
        return [WorkUnitMetadata(unit=unit, variables=_described(params))]

    async def release_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Do nothing: newer versions replace the published one, which lives as long as it has readers."""


class WeightDestination:
    """A rollout worker's side of a round: subscribes to the published parameters.

    Args:
      params: the parameters that the worker serves first. The tree, the shapes and the shardings do not change.
      pause: stops admitting requests, and ends or cancels those that run.
      resume: admits requests again. The worker then serves `params` of this object.
      wait: seconds to wait for the published version to be complete.
    """

    def __init__(self, params: Any, *, pause: Pause = _nothing, resume: Pause = _nothing, wait: float = 60.0) -> None:
        self.params = params
        self.version = 0  # number of the published version that is served
        self._shardings = jax.tree.map(lambda each: each.sharding, params)
        self._staged: tuple[int, Any] | None = None
        self._pause, self._resume = pause, resume
        self._wait = wait
        self._tracker = WorkerRoundTracker()
        self._phase = asyncio.Lock()  # a phase that has timed out may still run

    async def bind_weight_sync(self, **kwargs: Any) -> None:
        """Do nothing: a subscription needs no resources beforehand."""

    async def get_weight_sync_metadata(self, **kwargs: Any) -> Sequence[Any]:
        unit = WorkUnitId(job_name="atoll-rollout", job_replica_id=str(id(self)))
        return [WorkUnitMetadata(unit=unit, variables=_described(self.params))]

    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        async with self._phase:
            if self._tracker.admit(sync_request, "prepared"):
                await self._pause()
                self._tracker.complete(sync_request, "prepared")

    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Read the version of this round into new arrays. The served ones do not change."""
        async with self._phase:
            if self._tracker.admit(sync_request, "h2d_done"):
                name, version = _published(sync_request)
                found = await asyncio.to_thread(
                    subscribe, name, self._shardings, version=version, wait=self._wait, like=self.params
                )
                self._staged = (found.number, found.tree)
                self._tracker.complete(sync_request, "h2d_done")

    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Serve the arrays that were read."""
        async with self._phase:
            if self._tracker.admit(sync_request, "committed"):
                if self._staged is not None:  # otherwise a repetition after a lost reply
                    self.version, self.params = self._staged
                    self._staged = None
                await self._resume()
                self._tracker.complete(sync_request, "committed")

    async def abort_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Continue to serve the former arrays."""
        async with self._phase:
            if self._tracker.admit(sync_request, "aborted"):
                self._staged = None
                await self._resume()
                self._tracker.complete(sync_request, "aborted")

    async def get_weight_sync_status(self) -> Mapping[str, Any]:
        report: Mapping[str, Any] = self._tracker.report()
        return report


def _described(params: Any) -> tuple[Any, ...]:
    """Return Tunix's description of each array. A scalar is described as an array of one element."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        shape = tuple(leaf.shape) or (1,)
        ones = (1,) * len(shape)
        layout = tuple(range(len(shape)))[::-1]
        found.append(
            TensorMetadata(jax.tree_util.keystr(path) or ".", shape, ones, layout, item_size=leaf.dtype.itemsize)
        )
    return tuple(found)


def _published(request: Any) -> tuple[str, int]:
    """Return the name and the number of the version that the source of this round has published."""
    units = [each.unit for each in request.source_metadata or ()]
    if len(units) != 1:
        raise AtollError(f"a round has one source that publishes all parameters, not {len(units)}: {units}")
    return units[0].data_name, int(units[0].job_replica_id)
