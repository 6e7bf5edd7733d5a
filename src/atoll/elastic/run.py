"""`atoll.elastic.run`: a loop of training steps over the islands that work, whichever these are.

    an island fails:        the newest copy, on the islands that are left, and from its step on again
    one leaves, or is back:   what the last step made, on the islands that work now, and the next step

Invariant: each step's outputs are given once, in order. What a step computes depends on its number, the state before
it and the islands alone; so a step that is repeated gives what it gave.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from atoll.elastic.islands import Islands, is_loss
from atoll.elastic.preparation import Preparation
from atoll.elastic.replica import Replica, ReplicaStatistics, recover, replicate
from atoll.elastic.training import Make, Training
from atoll.errors import RecoveryError

_log = logging.getLogger(__name__)

# Between two looks at which islands work: the question costs half a millisecond.
_LOOK_SECONDS = 0.2
_WAIT_SECONDS = 0.05
# Losses without a step between them: what looks like a loss is then the training's own fault.
_MOST_ATTEMPTS = 8


@dataclass(frozen=True)
class Change:
    """The islands of a run from a step on, and why; `seconds` from the last step before to the first one computed.

    `repeated` counts the steps that were under way, or done, and are computed again.
    """

    reason: str  # "begun", "lost", "leaving" or "back"
    step: int
    islands: tuple[int, ...]
    repeated: int
    seconds: float


@dataclass(frozen=True)
class _Started:
    """A change that is under way."""

    reason: str
    step: int
    repeated: int
    since: float


class Run:
    """A training that goes on. Made by `run`; iterating it computes the steps."""

    def __init__(
        self,
        make: Make,
        state: Any,
        batches: Callable[[int], Any],
        steps: int,
        every: int,
        first: int,
        ahead: int,
        min_islands: int,
        patience: float,
    ) -> None:
        self._make = make
        self._batches = batches
        self._steps = steps
        self._every = every
        self._ahead = ahead
        self._min_islands = min_islands
        self._patience = patience
        self._islands = Islands(leaves=True)
        self._trainings: dict[tuple[int, ...], Training] = {}
        self._training: Training | None = None
        self._replica: Replica | None = None
        self._state: Any = state  # what was kept, while there is no training
        self._begun = self._finished = first  # the next step that is begun, and whose outputs are taken
        self._under_way: deque[tuple[int, Any]] = deque()  # steps, with their outputs
        self._outputs: deque[tuple[int, Any]] = deque()  # to be given
        self._on: tuple[int, ...] = ()
        self._looked = 0.0
        self._preparation: Preparation | None = None
        self._change: _Started | None = _Started("begun", first, 0, time.monotonic())
        self.changes: list[Change] = []

    @property
    def state(self) -> Any:
        """What the steps so far have made, as the training keeps it: to be saved, or read when all are done."""
        return self._state if self._training is None else self._training.keep(self._state)

    @property
    def islands(self) -> tuple[int, ...]:
        """On which it computes now."""
        return self._on

    def statistics(self) -> ReplicaStatistics | None:
        """What the copies have cost; None before the first step."""
        return None if self._replica is None else self._replica.statistics()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Computes the steps: the number of each, and its outputs as NumPy arrays. Each is given once."""
        attempts = 0
        while self._finished < self._steps:
            try:
                self._advance()
            except jax.errors.JaxRuntimeError as error:
                attempts += 1
                if not is_loss(error) or attempts > _MOST_ATTEMPTS or self._replica is None:
                    raise
                self._go_back(self._replica, error)
            else:
                attempts = 0
                self._report_change()
            while self._outputs:
                yield self._outputs.popleft()

    # ---- steps

    def _advance(self) -> None:
        """Begins as many steps as may be under way, and waits for the first.

        Raises what jax raises where an island fails.
        """
        training, replica = self._current()
        while self._begun < self._steps and len(self._under_way) < self._ahead:
            self._state, outputs = training.step(self._state, self._batches(self._begun))
            for leaf in jax.tree.leaves(outputs):
                leaf.copy_to_host_async()
            self._under_way.append((self._begun, outputs))
            self._begun += 1
            replica.refresh(training.keep(self._state), self._begun)
        self._finish_one()

    def _finish_one(self) -> None:
        number, outputs = self._under_way[0]
        values = jax.device_get(outputs)
        self._under_way.popleft()
        if number == self._finished:  # else it was repeated
            self._outputs.append((number, values))
            self._finished += 1

    # ---- the islands

    def _current(self) -> tuple[Training, Replica]:
        """The training that the next step is of: on other islands than the last one where these have changed."""
        if self._training is None or self._replica is None:
            return self._go_on(self._enough(), self._state)
        islands = self._changed()
        if islands is None:
            return self._training, self._replica
        while self._under_way:
            self._finish_one()
        return self._go_on(islands, self._training.keep(self._state))

    def _go_on(self, islands: tuple[int, ...], kept: Any) -> tuple[Training, Replica]:
        training = self._training_on(islands)
        self._state = training.place(kept)
        self._training, self._on = training, islands
        if self._replica is None:
            self._replica = replicate(training.keep(self._state), step=self._begun, every=self._every)
        else:
            self._replica.restart(training.keep(self._state), self._begun)
        return training, self._replica

    def _changed(self) -> tuple[int, ...] | None:
        """The islands on which to go on, where one is about to leave or is back; looks only now and then."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        away = self._islands.away()
        using = frozenset(self._on)
        working = self._islands.devices.keys() - away.lost - away.leaving
        if using & away.lost or not working or using == working:
            return None  # what is lost is raised where it is read
        islands = tuple(sorted(working))
        leaves = bool(using & away.leaving)
        if not leaves and not self._is_prepared(islands):
            return None
        self._change = _Started("leaving" if leaves else "back", self._begun, 0, now)
        return islands

    def _is_prepared(self, islands: tuple[int, ...]) -> bool:
        """Whether a step over these islands has been compiled; else that begins, and the run goes on meanwhile."""
        assert self._replica is not None
        if self._preparation is not None and self._preparation.islands != islands:
            self._preparation = None
        if self._preparation is None:
            training = self._training_on(islands)
            self._preparation = Preparation(islands, training, self._replica, self._batches(self._begun))
        if not self._preparation.is_over:
            return False
        self._preparation = None
        return True

    def _training_on(self, islands: tuple[int, ...]) -> Training:
        if islands not in self._trainings:
            self._trainings[islands] = self._make([self._islands.mesh(island) for island in islands])
        return self._trainings[islands]

    def _enough(self) -> tuple[int, ...]:
        """The islands that work, once they are enough."""
        deadline = time.monotonic() + self._patience
        while len(working := self._islands.working()) < self._min_islands:
            if time.monotonic() > deadline:
                raise RecoveryError(
                    f"after {self._patience:.0f} s {len(working)} of {len(self._islands.devices)} islands work "
                    f"({', '.join(map(str, working)) or 'none'}), and the training needs {self._min_islands} or more"
                )
            time.sleep(_WAIT_SECONDS)
        return working

    def _go_back(self, replica: Replica, error: BaseException) -> None:
        """To the newest copy: an island fails."""
        since = self._change.since if self._change is not None else time.monotonic()
        _log.warning("step %d: %s", self._finished, str(error).partition("\n")[0])
        self._under_way.clear()
        self._training = self._state = self._preparation = None
        begun = self._begun
        self._state, self._begun = recover(replica)
        self._change = _Started("lost", self._begun, begun - self._begun, since)

    def _report_change(self) -> None:
        if self._change is None:
            return
        change, self._change = self._change, None
        seconds = time.monotonic() - change.since
        self.changes.append(Change(change.reason, change.step, self._on, change.repeated, seconds))
        _log.info("%s", self.changes[-1])


def run(
    make: Make,
    state: Any,
    batches: Callable[[int], Any],
    *,
    steps: int,
    every: int = 20,
    first: int = 0,
    ahead: int = 2,
    min_islands: int = 1,
    patience: float = 120.0,
) -> Run:
    """Computes steps of training on all islands that work, whichever these are at the moment. For example::

        training = pw.elastic.data_parallel(gradients, update)
        run = pw.elastic.run(training, state, batch_of, steps=500, every=20)
        for step, loss in run:
            print(step, loss, run.islands)
        save(run.state)

    Where an island fails, the training goes on within seconds on those that are left, from the newest copy of its
    state (`atoll.replicate`). When one is back, the training has it again from the next step on, and loses nothing; nor
    does it where one is about to leave.

    Args:
      make: makes the training for given islands: `elastic.data_parallel`, `elastic.pipeline`, or a function of yours
        from a list of `jax.sharding.Mesh`, one for each island, to an `elastic.Training`.
      state: the first state, as the training's `keep` gives it. Arrays of JAX or NumPy; it is copied.
      batches: from the number of a step to its batch. The same number must give the same batch: steps are repeated.
      steps: up to which, and not including it, steps are computed.
      every: steps between two copies. After a loss at most so many are computed again, and those during which the copy
        was made, and those that were under way.
      first: the number of the first step.
      ahead: how many steps may be under way at a time.
      min_islands: with fewer it waits, for `patience` seconds.

    Returns an iterable of (number, outputs); the outputs of each step come once, as NumPy arrays, in order.

    Raises:
      atoll.BackendError: JAX does not run on Atoll in this process.
      atoll.RecoveryError: more was lost at once than there are copies of, or too few islands work for too long.
    """
    if every < 1 or ahead < 1 or min_islands < 1:
        raise ValueError(f"every={every}, ahead={ahead}, min_islands={min_islands}: each is 1 or more")
    return Run(make, state, batches, steps, every, first, ahead, min_islands, patience)
