"""`atoll.replicate` and `atoll.recover`: copies of arrays on other islands.

A *generation* holds the values of all arrays of a tree at one step. Each array is copied twice: on its own devices,
because the next step may consume the array, and from there to another island. So a generation survives the loss of any
one island. When the newer of two generations is complete, the older one is dropped. A third generation does not begin
before, so memory is bounded by two generations.

Invariant: `recover` returns all arrays of one generation.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.client import background_threads
from atoll.elastic.islands import Islands, is_loss
from atoll.errors import RecoveryError

# Attempts of `recover`. A further attempt is only needed if another island fails while it copies.
_ATTEMPTS = 5
_AXIS = "devices"  # axis of the meshes that `moved_sharding` makes


@dataclass(frozen=True)
class ReplicaStatistics:
    """Counts of a replica's generations so far, and its current size."""

    generations: int  # begun
    completed: int
    skipped: int  # due while the previous one was incomplete
    lost: int  # incomplete because an island failed
    nbytes: int  # total bytes of all current copies on all devices


class _Generation:
    """The copies of all arrays at `step`: one per array on its own devices and, later, one on another island.

    `there` holds the shardings of the second copies by the array's index. A thread sends the second copies only when
    the first ones are done. Otherwise they would occupy the queues of both islands and delay the next steps.
    """

    def __init__(self, step: int, structure: Any, snapshot: Sequence[Any], there: dict[int, Any]) -> None:
        self.step = step
        self.structure = structure
        self.copies = [[each] for each in snapshot]
        self.settled = threading.Event()
        self.failure: BaseException | None = None
        background_threads.start("atoll-replica", partial(self._copy, there))

    def _copy(self, there: dict[int, Any]) -> None:
        try:
            jax.block_until_ready(self.copies)
            sent = jax.device_put([self.copies[number][0] for number in there], list(there.values()))
            for number, copy in zip(there, sent, strict=True):
                self.copies[number].append(copy)
            jax.block_until_ready(sent)
        except BaseException as error:
            self.failure = error
        self.settled.set()

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(each) for copies in self.copies for each in copies)


def replicate(tree: Any, *, step: int = 0, every: int = 1, other_island: bool = True) -> Replica:
    """Keep a copy of all arrays of a tree on another island, in case the island of the arrays fails::

        replica = atoll.replicate(state, every=20)
        for step in range(1, 501):
            state, loss = train(state, batch(step))
            replica.refresh(state, step)      # every 20 steps, in the background
        ...
        state, step = atoll.recover(replica)     # after a loss

    Args:
      tree: a tree of jax arrays, each on devices of one island.
      step: the number of steps that have been computed.
      every: the number of steps after which `refresh` begins a new copy.
      other_island: False keeps the copy only on the arrays' own devices. Use it in scripts that have the whole state
        on each of several islands.

    The copies are ordinary arrays in device memory: two per array, and four while a new copy is incomplete. Returns
    immediately.

    Raises:
      atoll.BackendError: JAX does not run on Atoll in this process.
      atoll.RecoveryError: an array is on devices of several islands, or a leaf of the tree is not an array.
    """
    if every < 1:
        raise ValueError(f"every={every}: the number of steps between copies must be at least 1")
    replica = Replica(every, other_island, Islands())
    replica.restart(tree, step)
    return replica


def recover(replica: Replica, shardings: Any = None) -> tuple[Any, int]:
    """Return the newest consistent copy of all arrays, and its step. Waits until the arrays are ready.

    Args:
      replica: made by `replicate`.
      shardings: the destination, as for `jax.device_put`. None: the original shardings; arrays of an unavailable island
        move to the first available one, with the same sharding if it has the same number of devices.

    The replica keeps its own copies: the returned arrays may be donated, and `recover` may be called again.

    Raises atoll.RecoveryError if no copy is complete, because more than one island failed at once.
    """
    islands = replica.islands
    for _ in range(_ATTEMPTS):
        before = islands.away()
        working = sorted(islands.devices.keys() - before.lost - before.leaving)
        for generation in replica.generations() if working else ():
            wanted = _targets(generation, shardings, islands, working)
            found = _gather(generation.copies, wanted, before.lost, islands)
            if found is not None:
                return jax.tree.unflatten(generation.structure, found), generation.step
        if islands.away().losses == before.losses:  # otherwise a destination may have failed during the copy
            break
    steps = [f"step {generation.step}" for generation in replica.generations()]
    raise RecoveryError(
        f"no complete copy is left: each copy ({', '.join(steps)}) had arrays on an island that failed; islands "
        f"{working} of {sorted(islands.devices)} work. A replica survives the failure of one island at a time; "
        "restore a checkpoint"
    )


class Replica:
    """Copies of a tree of arrays on other islands. Made by `replicate`. Not thread-safe."""

    def __init__(self, every: int, other_island: bool, islands: Islands) -> None:
        self.every = every
        self._other_island = other_island
        self.islands = islands
        self._complete: _Generation | None = None
        self._begun: _Generation | None = None
        self._broken: _Generation | None = None  # an island failed before it was complete
        self._last = 0  # the step of the latest generation
        self._counts = {"generations": 0, "completed": 0, "skipped": 0, "lost": 0}

    @property
    def step(self) -> int | None:
        """The step of the newest complete generation, or None."""
        self._settle()
        return None if self._complete is None else self._complete.step

    def refresh(self, tree: Any, step: int) -> bool:
        """Begin a new generation if one is due, and return whether it began. Never blocks.

        `tree` holds the arrays after `step` steps; they may be donated right after the call. If the previous
        generation is incomplete, no new one begins.
        """
        self._settle()
        if step < self._last + self.every and self.generations():
            return False
        if self._begun is not None:
            self._counts["skipped"] += 1
            return False
        self._begin(tree, step)
        return True

    def restart(self, tree: Any, step: int) -> None:
        """Begin a new generation immediately, for a changed set of islands or an earlier step than the last."""
        self._settle()
        self._begun = None
        self._begin(tree, step)

    def wait(self) -> None:
        """Wait until the latest generation is complete or lost."""
        if self._begun is not None:
            self._begun.settled.wait()
        self._settle()

    def statistics(self) -> ReplicaStatistics:
        self._settle()
        return ReplicaStatistics(**self._counts, nbytes=sum(each.nbytes for each in self.generations()))

    def generations(self) -> list[_Generation]:
        """Return the generations, newest first. An incomplete one may still have a copy of each array."""
        return [each for each in (self._begun, self._broken, self._complete) if each is not None]

    def _begin(self, tree: Any, step: int) -> None:
        leaves, structure = jax.tree.flatten(tree)
        there = {}
        working = self.islands.working() if self._other_island else ()
        sizes = {island: len(devices) for island, devices in self.islands.devices.items()}
        for number, leaf in enumerate(leaves):
            island = other_island(_home(self.islands, leaf), working, sizes)
            if island is not None:
                there[number] = moved_sharding(leaf.sharding, leaf.shape, self.islands.devices[island])
        snapshot = jax.device_put(leaves, [leaf.sharding for leaf in leaves], may_alias=False)
        self._broken = None
        self._begun = _Generation(step, structure, snapshot, there)
        self._last = step
        self._counts["generations"] += 1

    def _settle(self) -> None:
        begun = self._begun
        if begun is None or not begun.settled.is_set():
            return
        self._begun = None
        if begun.failure is None:
            self._complete, self._broken = begun, None
            self._counts["completed"] += 1
        elif is_loss(begun.failure):
            self._broken = begun
            self._counts["lost"] += 1
        else:
            raise begun.failure


def _targets(generation: _Generation, shardings: Any, islands: Islands, working: Sequence[int]) -> list[Any]:
    if shardings is not None:
        from jax.api_util import flatten_axes

        return list(flatten_axes("shardings", generation.structure, shardings))
    wanted = []
    for copies in generation.copies:
        sharding = copies[0].sharding
        home = islands.of(sharding)
        if not home <= set(working):
            sharding = moved_sharding(sharding, copies[0].shape, islands.devices[working[0]])
        wanted.append(sharding)
    return wanted


def _gather(
    copies: Sequence[Sequence[Any]], wanted: Sequence[Any], lost: frozenset[int], islands: Islands
) -> list[Any] | None:
    """Copy one array of each row to its wanted sharding. Return None if a row has no usable array.

    To find whether a copy has survived a loss, the function uses it: a lost array fails at once. It skips arrays on
    lost islands, because it would wait for those.
    """
    left = [[copy for copy in row if not islands.of(copy.sharding) & lost] for row in copies]
    found: list[Any] = [None] * len(copies)
    missing = list(range(len(copies)))
    while missing:
        if not all(left[number] for number in missing):
            return None
        taken = [left[number].pop(0) for number in missing]
        made = jax.device_put(taken, [wanted[number] for number in missing], may_alias=False)
        failed = []
        for number, array in zip(missing, made, strict=True):
            try:
                array.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                if not is_loss(error):
                    raise
                failed.append(number)
            else:
                found[number] = array
        missing = failed
    return found


def _home(islands: Islands, leaf: Any) -> int:
    found = islands.of(leaf.sharding) if isinstance(leaf, jax.Array) else frozenset()
    if len(found) != 1:
        where = f"islands {sorted(found)}" if found else "no island of this session"
        raise RecoveryError(
            f"each leaf of the tree must be an array on one island, but a leaf is on {where}: {leaf!r:.200}"
        )
    (home,) = found
    return home


def _nbytes(array: Any) -> int:
    """Return the total bytes on all devices; a replicated array counts once per device."""
    elements = math.prod(array.sharding.shard_shape(array.shape))
    return int(elements * array.dtype.itemsize * len(array.sharding.device_set))


def moved_sharding(sharding: Any, shape: Sequence[int], devices: Sequence[Any]) -> Any:
    """Return the sharding of an array of this shape on `devices` that is most similar to `sharding`.

    If the number of devices is the same, the devices correspond one to one. Otherwise, an array that was not replicated
    is cut along the longest dimension that the number of devices divides. In all other cases it is replicated.
    """
    kind = sharding.memory_kind
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(devices[0], memory_kind=kind)
    if isinstance(sharding, NamedSharding) and sharding.mesh.devices.size == len(devices):
        mesh = sharding.mesh
        there = np.empty(len(devices), object)
        there[:] = devices
        same = Mesh(there.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)
        return NamedSharding(same, sharding.spec, memory_kind=kind)
    line = np.empty(len(devices), object)
    line[:] = devices
    spec = PartitionSpec() if sharding.is_fully_replicated else _cut(shape, len(devices))
    return NamedSharding(Mesh(line, (_AXIS,), axis_types=(AxisType.Auto,)), spec, memory_kind=kind)


def _cut(shape: Sequence[int], count: int) -> PartitionSpec:
    fits = [(size, -axis) for axis, size in enumerate(shape) if size and size % count == 0]
    if not fits:
        return PartitionSpec()
    axis = -max(fits)[1]
    return PartitionSpec(*[None] * axis, _AXIS)


def other_island(home: int, working: Sequence[int], sizes: dict[int, int]) -> int | None:
    """Return the island for second copies of arrays on island `home`, or None if no other island works.

    This is the next island in a ring, so that copies spread evenly; islands with as many devices are preferred.
    """
    others = [island for island in working if island != home]
    alike = [island for island in others if sizes[island] == sizes[home]]
    candidates = alike or others
    return min(candidates, key=lambda island: (island < home, island), default=None)
