"""What XLA calls in the place of a client's callables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atoll.errors import StatusError
from atoll.transfers.callbacks import Callbacks
from atoll.transfers.calls import ClientError
from atoll.transfers.client_errors import kept, wrapped
from atoll.transfers.dtypes import numpy_dtype
from atoll.worker.xla.client_callbacks import ResultTypes


class Held:
    """Lives as long as XLA can still call the client's Python: in a run, too, whose executable was dropped."""

    def __init__(self, callbacks: Callbacks) -> None:
        callbacks.retain()
        weakref.finalize(self, callbacks.release).atexit = False


def stubs(held: Held, callbacks: Callbacks, results: Sequence[ResultTypes]) -> list[Callable[..., Any]]:
    """A callable for each of the function's callbacks, in their order."""
    return [_stub(held, callbacks, position, types) for position, types in enumerate(results)]


def _stub(held: Held, callbacks: Callbacks, position: int, types: ResultTypes) -> Callable[..., Any]:
    def stub(*arguments: np.ndarray[Any, Any] | None) -> tuple[Any, ...]:
        _ = held
        try:
            return callbacks.call(position, types, arguments)
        except (ClientError, StatusError) as error:
            if not callbacks.spans_devices:
                raise wrapped(error) from None
            callbacks.keep_failure(kept(error))
            return tuple(None if dtype == "token" else np.zeros(shape, numpy_dtype(dtype)) for dtype, shape in types)

    return stub
