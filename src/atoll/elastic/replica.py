"""`atoll.replicate` and `atoll.recover`: second copies of arrays, on other islands than they are on.

A *generation* is what all arrays of the tree were at one step. Each array is copied twice: where it is, since the next
step may consume it, and from there to another island. So a generation outlives the loss of any one island. The older
of two is dropped once the newer is complete, and a third is not begun before: memory is bounded by two generations.

Invariant: what `recover` gives is of one generation, all arrays of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from atoll.elastic import background_threads
from atoll.elastic.array_placement import moved, other_island
from atoll.elastic.islands import Islands, is_loss
from atoll.errors import RecoveryError

# Of `recover`: each needs another loss, just while it copies.
_ATTEMPTS = 5


@dataclass(frozen=True)
class ReplicaStatistics:
    """What a replica has cost so far, and holds now."""

    generations: int  # begun
    completed: int
    skipped: int  # due while the one before was not complete yet
    lost: int  # that a loss kept from being completed
    nbytes: int  # on devices, of all copies that are held now


class _Generation:
    """The copies of all arrays as they were at `step`: of each one where it was and, soon, one on another island.

    `there` are where the others go, by the array's number. They are sent when the first ones are made: sooner, they
    would hold a place in line on both islands that the next steps could use. A thread waits for either, so that nobody
    else does.
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


class Replica:
    """Made by `replicate`. Not for several threads."""

    def __init__(self, every: int, other_island: bool, islands: Islands) -> None:
        self.every = every
        self._other_island = other_island
        self.islands = islands
        self._complete: _Generation | None = None
        self._begun: _Generation | None = None
        self._broken: _Generation | None = None  # a loss has taken some of its copies
        self._last = 0  # the step of the generation that was begun last
        self._counts = {"generations": 0, "completed": 0, "skipped": 0, "lost": 0}

    @property
    def step(self) -> int | None:
        """Of the newest complete generation."""
        self._settle()
        return None if self._complete is None else self._complete.step

    def refresh(self, tree: Any, step: int) -> bool:
        """Begins a new generation where one is due; `tree` is what the arrays are after `step` steps.

        Returns whether it did. Waits for nothing: where the one before is not complete yet, none is begun. The arrays
        may be donated right after.
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
        """As `refresh`, but at once: for another set of islands, or a step before the last one."""
        self._settle()
        self._begun = None
        self._begin(tree, step)

    def wait(self) -> None:
        """Until the generation that was begun last is complete, or lost."""
        if self._begun is not None:
            self._begun.settled.wait()
        self._settle()

    def statistics(self) -> ReplicaStatistics:
        self._settle()
        return ReplicaStatistics(**self._counts, nbytes=sum(each.nbytes for each in self.generations()))

    def generations(self) -> list[_Generation]:
        """The newest first. One that is not complete may still have a copy of each array."""
        return [each for each in (self._begun, self._broken, self._complete) if each is not None]

    def _begin(self, tree: Any, step: int) -> None:
        leaves, structure = jax.tree.flatten(tree)
        there = {}
        working = self.islands.working() if self._other_island else ()
        sizes = {island: len(devices) for island, devices in self.islands.devices.items()}
        for number, leaf in enumerate(leaves):
            island = other_island(_home(self.islands, leaf), working, sizes)
            if island is not None:
                there[number] = moved(leaf.sharding, leaf.shape, self.islands.devices[island])
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


def replicate(tree: Any, *, step: int = 0, every: int = 1, other_island: bool = True) -> Replica:
    """Keeps a second copy of all arrays of a tree on another island, for when the one that they are on is lost::

        replica = pw.replicate(state, every=20)
        for step in range(1, 501):
            state, loss = train(state, batch(step))
            replica.refresh(state, step)      # every 20 steps, in the background
        ...
        state, step = pw.recover(replica)     # after a loss

    Args:
      tree: a tree of jax arrays, each on devices of one island.
      step: how many steps have led to it.
      every: from so many steps to the next, `refresh` begins a new copy.
      other_island: with False the copy is on the devices of the arrays alone: for scripts that use several islands,
        each with all of the state.

    The copies are ordinary arrays in their devices' memory: two for each array, and four from the moment in which a new
    one is begun until it is complete. Returns at once.

    Raises:
      atoll.BackendError: JAX does not run on Atoll in this process.
      atoll.RecoveryError: an array is on devices of several islands, or a leaf of the tree is no array.
    """
    if every < 1:
        raise ValueError(f"every={every}: a copy is made every so many steps, from 1 on")
    replica = Replica(every, other_island, Islands())
    replica.restart(tree, step)
    return replica


def recover(replica: Replica, shardings: Any = None) -> tuple[Any, int]:
    """The newest consistent copy of all arrays, and the step that it is of. Waits until it is there.

    Args:
      shardings: where the arrays go, as `jax.device_put` takes it. None: where they were; what was on an island that is
        away goes to the first that works, cut in the same way where that has as many devices.

    The replica keeps its own copies: what is returned may be donated, and may be asked for again.

    Raises atoll.RecoveryError where no copy is whole: more was lost at once than one island.
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
        if islands.away().losses == before.losses:  # else it may be where the arrays were to go that was lost meanwhile
            break
    steps = [f"step {generation.step}" for generation in replica.generations()]
    raise RecoveryError(
        f"nothing is left to recover: of each copy ({', '.join(steps)}) something was on an island that failed; "
        f"islands {working} of {sorted(islands.devices)} work. A replica outlives the failure of one island at a time; "
        "for more there are checkpoints"
    )


def _targets(generation: _Generation, shardings: Any, islands: Islands, working: Sequence[int]) -> list[Any]:
    if shardings is not None:
        from jax.api_util import flatten_axes

        return list(flatten_axes("shardings", generation.structure, shardings))
    wanted = []
    for copies in generation.copies:
        sharding = copies[0].sharding
        home = islands.of(sharding)
        there = sharding if home <= set(working) else moved(sharding, copies[0].shape, islands.devices[working[0]])
        wanted.append(there)
    return wanted


def _gather(
    copies: Sequence[Sequence[Any]], wanted: Sequence[Any], lost: frozenset[int], islands: Islands
) -> list[Any] | None:
    """One array of each row, put where it is wanted; None where none of a row is whole any more.

    Whether a copy has outlived a loss is found by using it: what is lost fails at once. Those of islands that are away
    are not asked, since they would be waited for.
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
        raise RecoveryError(f"a leaf of the tree is on {where}, and each is to be an array on one: {leaf!r:.200}")
    (home,) = found
    return home


def _nbytes(array: Any) -> int:
    """On all devices together: a replicated array is there several times."""
    elements = math.prod(array.sharding.shard_shape(array.shape))
    return int(elements * array.dtype.itemsize * len(array.sharding.device_set))
