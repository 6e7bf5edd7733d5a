"""`atoll.trace`: records what the cluster runs during a block of Python."""

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
    """Trace what the cluster runs during the block, for all sessions that the user may see. For example::

        with atoll.trace("step.json") as spans:
            jax.block_until_ready(train_step(state, batch))
        milliseconds = sum(span.ended - span.started for span in spans) / 1e6

    The list is filled when the block ends, with a `Span` for each computation and transfer that has ended by then. The
    cluster keeps the last 100,000 spans. Times are nanoseconds of the controller's clock.

    With `path`, this also writes a file of Chrome trace events, which https://ui.perfetto.dev opens: a row per device,
    the requests of clients, and what sessions waited for, during ten minutes at most.

    Raises:
      atoll.BackendError: JAX does not run on Atoll in this process.
      atoll.ConnectError: The controller does not answer.
      OSError: The file cannot be written. If its directory does not exist, the block does not run.
    """
    cluster = backend.cluster()
    if cluster is None:
        raise BackendError(
            "JAX does not run on Atoll in this process: start it with JAX_PLATFORMS=atoll, or call atoll.connect()"
        )
    file = None if path is None else Path(path).absolute()
    if file is not None and not file.parent.is_dir():
        raise FileNotFoundError(f"cannot write the trace {file.name}: the directory {file.parent} does not exist")
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
