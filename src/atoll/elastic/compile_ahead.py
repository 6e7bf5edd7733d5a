"""Compiles the step of an elastic run for the islands that would remain after a loss, while the run continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any, Protocol, runtime_checkable

import jax

from atoll.client import background_threads
from atoll.elastic.islands import is_loss

_log = logging.getLogger(__name__)

# Islands that the run's islands and those of a kept training differ by, at most.
_MAX_CHANGES = 2

IslandNumbers = tuple[int, ...]


@runtime_checkable
class CompilesAhead(Protocol):
    """A training that can compile its step without computing one."""

    def compile_ahead(self, kept: Any, batch: Any) -> None:
        """Compile the step for a state that `place` makes of `kept`, and for batches like `batch`.

        The leaves of `kept` are `jax.ShapeDtypeStruct`. Must not use memory of devices. Called in the background, while
        another training computes steps.
        """


class CompilationAhead:
    """Compiles the trainings on the islands that remain if one island fails, on one thread at a time.

    Each training is compiled once, after a pause as long as the compilation before it, so compilations take at most
    half of the time. If one fails, the log has a warning, and the run continues. The first step after the loss compiles
    again and raises the error. A compilation that fails because an island is lost is repeated when the run is on these
    islands again.
    """

    def __init__(
        self,
        limit: int,
        fewest_islands: int,
        start: Callable[[str, Callable[[], None]], None] = background_threads.start_compiling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._fewest_islands = fewest_islands
        self._start = start
        self._clock = clock
        self._begun: set[IslandNumbers] = set()
        self._compiled: set[IslandNumbers] = set()
        self._over = Event()
        self._over.set()
        self._next_at = 0.0

    def advance(
        self, islands: IslandNumbers, training_on: Callable[[IslandNumbers], Any], kept: Any, batch: Any
    ) -> None:
        """Begin the next compilation for a run on `islands`, unless one is under way or the pause is not over.

        `kept` is the state of the run, of which only the types are used. `training_on` makes a training.
        """
        if not self._over.is_set() or self._clock() < self._next_at:
            return
        for remaining in self._remaining(islands):
            if remaining not in self._begun:
                self._begun.add(remaining)
                types = jax.tree.map(type_of, kept)
                self._over.clear()
                try:
                    self._start("atoll-compile-ahead", partial(self._compile, remaining, training_on, types, batch))
                except RuntimeError as error:  # no thread can be started
                    self._failed(remaining, error)
                    self._over.set()
                return

    def forget_distant(self, islands: IslandNumbers) -> list[IslandNumbers]:
        """Forget, and return, the islands of trainings that two losses and returns cannot lead to from `islands`."""
        distant = [each for each in self._begun if len(set(each) ^ set(islands)) > _MAX_CHANGES]
        self._begun.difference_update(distant)
        self._compiled.difference_update(distant)
        return distant

    @property
    def compiled(self) -> list[IslandNumbers]:
        """The islands for which the step is compiled."""
        return sorted(self._compiled)

    def _remaining(self, islands: IslandNumbers) -> list[IslandNumbers]:
        """Return the islands without each of the first `limit` ones, if the run continues on so few."""
        if len(islands) <= self._fewest_islands:
            return []
        return [tuple(each for each in islands if each != island) for island in islands[: self._limit]]

    def _compile(
        self, islands: IslandNumbers, training_on: Callable[[IslandNumbers], Any], types: Any, batch: Any
    ) -> None:
        began = self._clock()
        try:
            training = training_on(islands)
            if isinstance(training, CompilesAhead):
                training.compile_ahead(types, batch)
                if islands in self._begun:  # otherwise it was forgotten meanwhile
                    self._compiled.add(islands)
        except Exception as error:  # of the user's functions, too
            self._failed(islands, error)
            if is_loss(error):
                self._begun.discard(islands)
        finally:
            ended = self._clock()
            self._next_at = ended + (ended - began)
            self._over.set()

    def _failed(self, islands: IslandNumbers, error: Exception) -> None:
        text = str(error).partition("\n")[0] or type(error).__name__
        _log.warning("failed to compile a step for islands %s: %s", islands, text)


def type_of(leaf: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Return the type of an array with its own sharding, or with `sharding`."""
    there = leaf.sharding if sharding is None else sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there, weak_type=leaf.weak_type)
