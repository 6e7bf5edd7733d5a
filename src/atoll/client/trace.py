"""`atoll.trace`: what the cluster ran while a piece of Python ran."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from atoll.client import backend
from atoll.errors import ClusterError
from atoll.operate.question import ask_for_trace
from atoll.operate.traces import chrome_trace
from atoll.protocol.spans import Span
from atoll.wire.address import parse_address


@contextlib.contextmanager
def trace(path: str | os.PathLike[str] | None = None) -> Iterator[list[Span]]:
    """Traces what the cluster runs during the block, of all its sessions.

        with atoll.trace("step.json"):
            jax.block_until_ready(train_step(state, batch))

    Gives a list that is filled with `Span`s when the block ends; only what has ended by then is in it. With `path`, a
    file of Chrome's trace events is written, which https://ui.perfetto.dev opens: a row for each host.

    The cluster keeps the last 100,000 spans. Times are those of each host's own clock.

    Raises:
      atoll.errors.ClusterError: JAX does not run on Atoll in this process.
      atoll.errors.ConnectError: the controller does not answer.
    """
    cluster = backend.cluster()
    if cluster is None:
        raise ClusterError("JAX does not run on Atoll here: start it with JAX_PLATFORMS=atoll, or in `atoll.connect`")
    spans: list[Span] = []
    since = time.monotonic_ns()
    yield spans
    address, token = cluster
    spans += ask_for_trace(parse_address(address), token, since)
    if path is not None:
        Path(path).write_bytes(chrome_trace(spans))
