"""The side of Atoll: `elastic.run` over the islands of the cluster of ATOLL_ADDRESS; before it, plain loops.

The plain loops compute the same steps on 4, 3 and 2 islands, without copies and without a look at what works: what so
many islands can give. Then, in turn, without and with copies on all islands: what these cost.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import jax

import atoll
from atoll.elastic.islands import Islands
from benchmarks.elastic import work

TRAINING = atoll.elastic.data_parallel(work.gradients, work.update)


def plain(count: int, seconds: float, state: Any, every: int = 0) -> float:
    """Return the steps per second on the first `count` islands.

    With `every`, the state is copied after this many steps.
    """
    islands = Islands()
    training = TRAINING([islands.mesh(island) for island in sorted(islands.devices)[:count]])
    placed = training.place(state)
    replica = atoll.replicate(training.keep(placed), every=every) if every else None
    under_way: deque[Any] = deque()
    number, began, counted = 0, 0.0, 0
    while not began or time.perf_counter() - began < seconds:
        placed, loss = training.step(placed, work.batch(number))
        number += 1
        if replica is not None:
            replica.refresh(training.keep(placed), number)
        under_way.append(loss)
        if len(under_way) > work.AHEAD:
            jax.device_get(under_way.popleft())
            counted += bool(began)
            began = began or (time.perf_counter() if number == 2 * work.AHEAD else 0.0)
    return counted / (time.perf_counter() - began)


def main() -> None:
    seconds, megabytes = work.argument(1), work.argument(2)
    state = work.first_state(megabytes)
    for count in (4, 3, 2):
        work.report("plain", devices=count, rate=plain(count, seconds, state))
    for _ in range(3):
        for every in (0, work.EVERY):
            work.report("copies", every=every, rate=plain(4, seconds, state, every))
    run = atoll.elastic.run(TRAINING, state, work.batch, steps=1 << 40, every=work.EVERY, ahead=work.AHEAD)
    reported = 0
    for step, loss in run:
        work.report("step", step=step, loss=float(loss), devices=len(run.islands))
        for each in run.changes[reported:]:
            reported += 1
            work.report("change", why=each.reason, devices=len(each.islands), repeated=each.repeated, took=each.seconds)


if __name__ == "__main__":
    main()
