"""`atoll.trace`: what the cluster ran while a piece of Python ran."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from atoll.client import backend
from atoll.errors import BackendError
from atoll.operate.operator_requests import request_recording, request_trace
from atoll.operate.output_files import write_whole
from atoll.operate.traces import chrome_trace
from atoll.protocol.spans import Span
from atoll.wire.address import parse_address


@contextlib.contextmanager
def trace(path: str | os.PathLike[str] | None = None) -> Iterator[list[Span]]:
    """Traces what the cluster runs during the block, for all its sessions, or for a user's own. For example::

        with atoll.trace("step.json") as spans:
            jax.block_until_ready(train_step(state, batch))
        milliseconds = sum(span.ended - span.started for span in spans) / 1e6

    Gives a list that is filled with `Span`s when the block ends; only what has ended by then is in it. With `path`, a
    file of Chrome's trace events is written, which https://ui.perfetto.dev opens: a row for each device, and what
    sessions waited for, and their clients asked, during ten minutes at most.

    The cluster keeps the last 100,000 spans. Their times are nanoseconds of the controller's clock.

    Raises:
      atoll.BackendError: JAX does not run on Atoll in this process.
      atoll.ConnectError: the controller does not answer.
      OSError: the file cannot be written. Where its directory does not exist, before the block runs.
    """
    cluster = backend.cluster()
    if cluster is None:
        raise BackendError(
            "JAX does not run on Atoll in this process: start it with JAX_PLATFORMS=atoll, or call atoll.connect()"
        )
    file = None if path is None else Path(path).absolute()
    if file is not None and not file.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {file.parent} for the trace {file.name}")
    spans: list[Span] = []
    address, token, join = cluster
    where = parse_address(address)
    recording = request_recording(where, token, join=join)
    try:
        yield spans
    finally:
        record = request_trace(where, token, join=join, recording=recording)
    spans += record.spans
    if file is not None:
        write_whole(file, chrome_trace(record))
