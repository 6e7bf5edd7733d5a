"""A training of the soak that shrinks and grows with the islands, each loss of which is checked against NumPy.

Its numbers are whole, so sums are exact in whatever parts they are made, and a loss is the same on any islands. Prints
a line for each step and each change of its islands. Ends with status 3 at a wrong loss, with 0 when its time is over.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import atoll as pw
from scripts.soak.client import LOST_PROXY, WRONG, lost_its_proxy

_ROWS, _WIDTH, _RANGE = 24, 256, 4096.0
_EVERY = 5  # steps from copy to copy
_PAUSE = 0.05  # seconds between steps: one of a model that is larger
_STEPS = 1 << 40


class Training:
    """Return the expected result, computed with NumPy: a step's state is the sum of all rows before it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.total = np.zeros(_WIDTH)

    def batch(self, step: int) -> Any:
        return np.random.default_rng((self.seed, step)).integers(0, 64, (_ROWS, _WIDTH)).astype(np.float64)

    def next_loss(self) -> float:
        rows = self.batch(self.step)
        loss = float((rows @ self.total).sum())
        self.total = (self.total + rows.sum(axis=0)) % _RANGE
        self.step += 1
        return loss

    def run_on(self, end: float) -> None:
        """From where it is, until its time is over. Raises RecoveryError where all copies were lost at once."""
        make = pw.elastic.data_parallel(_gradients, _update)
        run = pw.elastic.run(make, self.total, self.batch, steps=_STEPS, every=_EVERY, first=self.step)
        seen = 0
        for step, mean in run:
            expected, found = self.next_loss(), round(float(mean) * _ROWS)
            if (step, found) != (self.step - 1, expected):
                print(f"WRONG: step {step} gives {found}; step {self.step - 1} is to give {expected}", flush=True)
                sys.exit(WRONG)
            print("trained", flush=True)
            for change in run.changes[seen:]:
                print(change.reason, flush=True)
            seen = len(run.changes)
            if time.monotonic() > end:
                return
            time.sleep(_PAUSE)


def _gradients(total: Any, rows: Any) -> tuple[Any, Any]:
    return jnp.mean(rows, axis=0), jnp.mean(rows @ total)


def _update(total: Any, gradient: Any) -> Any:
    return (total + jnp.round(gradient * _ROWS)) % _RANGE


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # of one that hangs
    seed, seconds = int(sys.argv[1]), float(sys.argv[2])
    jax.config.update("jax_enable_x64", True)
    training = Training(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            training.run_on(end)
        except pw.RecoveryError as error:
            print(error, file=sys.stderr)
            print("recovered", flush=True)  # from what a user would have as a checkpoint
        except jax.errors.JaxRuntimeError as error:
            if not lost_its_proxy(error):
                raise
            sys.exit(LOST_PROXY)


if __name__ == "__main__":
    main()
