"""A training that is to go on over other islands is compiled for them beside the steps that are computed meanwhile."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import jax

from atoll.elastic import background_threads
from atoll.elastic.replica import Replica, recover
from atoll.elastic.training import Training
from atoll.errors import RecoveryError

_log = logging.getLogger(__name__)


class Preparation:
    """Computes one step over `islands`, of a copy of the state, on a thread of its own. What it computes is dropped.

    It takes the memory of a state on each of the islands while it lasts. `is_over` also where it failed: then the
    training's own first step there says why.
    """

    def __init__(self, islands: tuple[int, ...], training: Training, replica: Replica, batch: Any) -> None:
        self.islands = islands
        self._over = threading.Event()
        background_threads.start("atoll-prepare", partial(self._compute, training, replica, batch))

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def _compute(self, training: Training, replica: Replica, batch: Any) -> None:
        try:
            kept, _ = recover(replica)
            jax.block_until_ready(training.step(training.place(kept), batch))
        except (jax.errors.JaxRuntimeError, RecoveryError) as error:
            _log.warning("no step was prepared on islands %s: %s", self.islands, str(error).partition("\n")[0])
        finally:
            self._over.set()
