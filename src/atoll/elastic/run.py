"""`atoll.elastic.run`: a loop of training steps on the islands that are available.

If an island fails, the run continues on the remaining islands from the newest copy, and repeats the steps since then.
If an island leaves or returns, the run continues on the available islands from the state after the last step.

Invariant: the outputs of each step are yielded once, in order. The result of a step depends only on its number, the
state before it and the islands, so a repeated step gives the same outputs on the same islands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from atoll.client import background_threads
from atoll.elastic.compile_ahead import CompilationAhead, CompilesAhead
from atoll.elastic.islands import Islands, is_loss
from atoll.elastic.replica import Replica, ReplicaStatistics, recover, replicate
from atoll.errors import RecoveryError

_log = logging.getLogger(__name__)

# Interval between queries of the available islands. A query takes half a millisecond.
_QUERY_SECONDS = 0.2
_WAIT_SECONDS = 0.05
# Losses without a successful step between them. After these, the error is assumed to be the training's own.
_MAX_ATTEMPTS = 8


class Training(Protocol):
    """A training on certain islands. It holds no arrays.

    `run` calls the methods on its own thread, except that it may compute one step in the background before it changes
    to other islands. A training that also has the method of `CompilesAhead` loses no time to compilations after a loss.
    Methods need not check for failed islands: `run` gets the error when it reads the arrays.
    """

    def place(self, kept: Any) -> Any:
        """Return the state on this training's devices from another training's `keep`.

        Must copy, because `kept` is used again.
        """

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Compute one step; return the next state and the outputs for the user. Consumes the state. Must not block."""

    def keep(self, state: Any) -> Any:
        """Return a tree of the arrays that must survive a loss, each on one island."""


# Makes a training on the given islands: one mesh per island, ordered by the islands' numbers.
Make = Callable[[Sequence[Mesh]], Training]


@dataclass(frozen=True)
class Change:
    """A change of the islands of a run.

    `step` is the first step on the new islands, and `seconds` is the time without computed steps. `repeated` counts the
    steps that were in flight or done and are computed again.
    """

    reason: str  # "begun", "lost", "leaving" or "back"
    step: int
    islands: tuple[int, ...]
    repeated: int
    seconds: float


@dataclass(frozen=True)
class _PendingChange:
    """A change that has begun; it ends with the next computed step."""

    reason: str
    step: int
    repeated: int
    since: float


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
    compile_ahead: int = 8,
) -> Run:
    """Compute training steps on all islands that are available at the moment. For example::

        training = atoll.elastic.data_parallel(gradients, update)
        run = atoll.elastic.run(training, state, batch_of, steps=500, every=20)
        for step, loss in run:
            print(step, loss, run.islands)
        save(run.state)

    If an island fails, the training continues within seconds on the remaining islands, from the newest copy of its
    state (`atoll.replicate`). If an island returns or is about to leave, the training changes its islands between two
    steps and repeats no step.

    Args:
      make: makes the training for given islands: the result of `elastic.data_parallel` or `elastic.pipeline`, or your
        own function from a list of `jax.sharding.Mesh`, one per island, to an `elastic.Training`.
      state: the first state, as the training's `keep` returns it, with JAX or NumPy arrays. It is copied.
      batches: returns the batch of a step number. It must return the same batch again if a step is repeated.
      steps: the end of the range of step numbers (exclusive).
      every: the number of steps between two copies. After a loss, the run repeats at most this many steps, the steps
        that were computed while the copy was made, and the steps in flight.
      first: the number of the first step.
      ahead: the maximum number of steps in flight.
      min_islands: if fewer islands are available, the run waits for up to `patience` seconds.
      patience: seconds to wait for `min_islands` islands.
      compile_ahead: the number of islands for whose loss the run compiles the step in advance, in the background. 0 to
        compile after a loss. It needs no memory for arrays. Trainings of your own need the method `compile_ahead`.

    Returns an iterable of (number, outputs) that yields each step once, in order, with NumPy arrays.

    Raises:
      atoll.BackendError: JAX does not run on Atoll in this process.
      atoll.RecoveryError: all copies were lost, or too few islands are available for `patience` seconds.
    """
    if every < 1 or ahead < 1 or min_islands < 1:
        raise ValueError(f"every={every}, ahead={ahead}, min_islands={min_islands}: each must be at least 1")
    if compile_ahead < 0:
        raise ValueError(f"compile_ahead={compile_ahead}: it must be at least 0")
    return Run(make, state, batches, steps, every, first, ahead, min_islands, patience, compile_ahead)


class Run:
    """An elastic training. Made by `run`; iterating over it computes the steps."""

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
        compile_ahead: int,
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
        self._making = threading.Lock()
        self._compilation_ahead = CompilationAhead(compile_ahead, min_islands)
        self._training: Training | None = None
        self._replica: Replica | None = None
        self._batch: Any = None  # of the latest step
        self._state: Any = state  # the training's state; without a training, a kept state
        self._begun = self._finished = first  # the next steps to begin and to finish
        self._under_way: deque[tuple[int, Any]] = deque()  # steps in flight, with their outputs
        self._outputs: deque[tuple[int, Any]] = deque()  # finished steps that were not yielded yet
        self._on: tuple[int, ...] = ()
        self._queried_at = 0.0
        self._preparation: Preparation | None = None
        self._change: _PendingChange | None = _PendingChange("begun", first, 0, time.monotonic())
        self.changes: list[Change] = []

    @property
    def state(self) -> Any:
        """The state after the steps so far, as `Training.keep` returns it, to save it or to read the result."""
        return self._state if self._training is None else self._training.keep(self._state)

    @property
    def islands(self) -> tuple[int, ...]:
        """The islands on which the run computes now."""
        return self._on

    @property
    def compiled_ahead(self) -> list[tuple[int, ...]]:
        """The sets of islands for which the step was compiled before the run computes on them."""
        return self._compilation_ahead.compiled

    def statistics(self) -> ReplicaStatistics | None:
        """Return statistics about the copies of the state; None before the first step."""
        return None if self._replica is None else self._replica.statistics()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Compute the steps. Yield each step's number and its outputs as NumPy arrays, once per step."""
        attempts = 0
        while self._finished < self._steps:
            try:
                self._advance()
            except jax.errors.JaxRuntimeError as error:
                attempts += 1
                if not is_loss(error) or attempts > _MAX_ATTEMPTS or self._replica is None:
                    raise
                self._recover(self._replica, error)
            else:
                attempts = 0
                self._report_change()
            while self._outputs:
                yield self._outputs.popleft()

    # ---- steps

    def _advance(self) -> None:
        """Begin as many steps as may be in flight, and wait for the first one.

        Raises jax.errors.JaxRuntimeError if an island fails.
        """
        training, replica = self._current()
        while self._begun < self._steps and len(self._under_way) < self._ahead:
            self._batch = self._batches(self._begun)
            self._state, outputs = training.step(self._state, self._batch)
            for leaf in jax.tree.leaves(outputs):
                leaf.copy_to_host_async()
            self._under_way.append((self._begun, outputs))
            self._begun += 1
            replica.refresh(training.keep(self._state), self._begun)
        self._finish_one()
        if self._change is None and self._preparation is None and isinstance(training, CompilesAhead):
            self._compilation_ahead.advance(self._on, self._training_on, training.keep(self._state), self._batch)

    def _finish_one(self) -> None:
        number, outputs = self._under_way[0]
        values = jax.device_get(outputs)
        self._under_way.popleft()
        if number == self._finished:  # otherwise the step was repeated
            self._outputs.append((number, values))
            self._finished += 1

    # ---- the islands

    def _current(self) -> tuple[Training, Replica]:
        """Return the training and the replica for the next step, on new islands if the available ones have changed."""
        if self._training is None or self._replica is None:
            return self._continue_on(self._wait_for_islands(), self._state)
        islands = self._changed_islands()
        if islands is None:
            return self._training, self._replica
        while self._under_way:
            self._finish_one()
        return self._continue_on(islands, self._training.keep(self._state))

    def _continue_on(self, islands: tuple[int, ...], kept: Any) -> tuple[Training, Replica]:
        training = self._training_on(islands)
        self._state = training.place(kept)
        self._training, self._on = training, islands
        for distant in self._compilation_ahead.forget_distant(islands):
            self._trainings.pop(distant, None)
        if self._replica is None:
            self._replica = replicate(training.keep(self._state), step=self._begun, every=self._every)
        else:
            self._replica.restart(training.keep(self._state), self._begun)
        return training, self._replica

    def _changed_islands(self) -> tuple[int, ...] | None:
        """Return the islands to continue on if one is about to leave or has returned, or None.

        Queries the islands at most once per `_QUERY_SECONDS`.
        """
        now = time.monotonic()
        if now - self._queried_at < _QUERY_SECONDS:
            return None
        self._queried_at = now
        away = self._islands.away()
        using = frozenset(self._on)
        working = self._islands.devices.keys() - away.lost - away.leaving
        if using & away.lost or not working or using == working:
            return None  # reading a lost array raises
        islands = tuple(sorted(working))
        leaves = bool(using & away.leaving)
        if not leaves and not self._is_prepared(islands):
            return None
        self._change = _PendingChange("leaving" if leaves else "back", self._begun, 0, now)
        return islands

    def _is_prepared(self, islands: tuple[int, ...]) -> bool:
        """Return whether a step on these islands is compiled. If not, start to compile it in the background."""
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
        with self._making:  # also called in the background
            if islands not in self._trainings:
                self._trainings[islands] = self._make([self._islands.mesh(island) for island in islands])
            return self._trainings[islands]

    def _wait_for_islands(self) -> tuple[int, ...]:
        """Wait until at least `min_islands` islands are available, and return them."""
        deadline = time.monotonic() + self._patience
        while len(working := self._islands.working()) < self._min_islands:
            if time.monotonic() > deadline:
                raise RecoveryError(
                    f"after {self._patience:.0f} s {len(working)} of {len(self._islands.devices)} islands work "
                    f"({', '.join(map(str, working)) or 'none'}), and the training needs at least {self._min_islands}"
                )
            time.sleep(_WAIT_SECONDS)
        return working

    def _recover(self, replica: Replica, error: BaseException) -> None:
        """Return to the newest copy after an island failed."""
        since = self._change.since if self._change is not None else time.monotonic()
        _log.warning("step %d: %s", self._finished, str(error).partition("\n")[0])
        self._under_way.clear()
        self._training = self._state = self._preparation = None
        begun = self._begun
        self._state, self._begun = recover(replica)
        self._change = _PendingChange("lost", self._begun, begun - self._begun, since)

    def _report_change(self) -> None:
        if self._change is None:
            return
        change, self._change = self._change, None
        seconds = time.monotonic() - change.since
        self.changes.append(Change(change.reason, change.step, self._on, change.repeated, seconds))
        _log.info("%s", self.changes[-1])


class Preparation:
    """Compiles a training for `islands` in the background: it computes one step on a copy of the state.

    The results are dropped. Meanwhile it needs memory for a second state on each of the islands. If it fails, `is_over`
    is also true, and the training's first step on the islands raises the error.
    """

    def __init__(self, islands: tuple[int, ...], training: Training, replica: Replica, batch: Any) -> None:
        self.islands = islands
        self._over = threading.Event()
        background_threads.start_compiling("atoll-prepare", partial(self._compute, training, replica, batch))

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def _compute(self, training: Training, replica: Replica, batch: Any) -> None:
        try:
            kept, _ = recover(replica)
            jax.block_until_ready(training.step(training.place(kept), batch))
        except (jax.errors.JaxRuntimeError, RecoveryError) as error:
            _log.warning("failed to prepare a step on islands %s: %s", self.islands, str(error).partition("\n")[0])
        finally:
            self._over.set()
