"""A worker's answers to queries: layouts of arrays, memory of devices, costs and texts of functions."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.cluster.processes.machine_memory import machine_memory
from atoll.decodable import decodable
from atoll.devices.device import DeviceBackend
from atoll.errors import Code, StatusError
from atoll.protocol import messages as m
from atoll.worker.host_functions import HostFunctions

# An answer, such as the text of a program, which is sent in one frame (`wire.framing`).
MAX_ANSWER_BYTES = 32 << 20
_array_kind = msgspec.msgpack.Decoder(decodable(m.ArrayKind)).decode
_device_memory = msgspec.msgpack.Decoder(decodable(m.DeviceMemory)).decode


class QueryAnswers:
    """Answers queries. Some take long, so do not call this on the thread that handles messages."""

    def __init__(self, backend: DeviceBackend, functions: HostFunctions) -> None:
        self._backend = backend
        self._functions = functions

    def answer(self, query: m.WorkerQuery) -> bytes:
        """Return the answer to a query of a kind in `ANSWERS`. Raise StatusError."""
        answer = ANSWERS[query.what](self, query)
        if len(answer) > MAX_ANSWER_BYTES:
            text = f"the answer has {len(answer):,} bytes: at most {MAX_ANSWER_BYTES:,} are allowed"
            raise StatusError(Code.RESOURCE_EXHAUSTED, text)
        return answer

    def _layout(self, query: m.WorkerQuery) -> bytes:
        kind = _array_kind(query.payload)
        return self._backend.default_layout(kind.dtype, kind.shape, kind.ordinal).encode()

    def _cost(self, query: m.WorkerQuery) -> bytes:
        return msgspec.json.encode(self._functions.get(query.subject).loaded.cost_analysis())

    def _text(self, query: m.WorkerQuery) -> bytes:
        return self._functions.get(query.subject).loaded.text().encode()

    def _memory(self, query: m.WorkerQuery) -> bytes:
        device = _device_memory(query.payload)
        return msgspec.json.encode(memory_stats(self._backend, device.ordinal, device.known))


# The method that answers a query, by its kind. A profile takes its time, and `MessageHandler` starts and ends it.
ANSWERS: dict[m.QueryKind, Callable[[QueryAnswers, m.WorkerQuery], bytes]] = {
    m.QueryKind.LAYOUT: QueryAnswers._layout,
    m.QueryKind.COST: QueryAnswers._cost,
    m.QueryKind.TEXT: QueryAnswers._text,
    m.QueryKind.MEMORY: QueryAnswers._memory,
}


def memory_stats(backend: DeviceBackend, ordinal: int, known: dict[str, int]) -> dict[str, int]:
    """Return what is known to the controller and what the platform reports, always with `bytes_limit`.

    The limit is the controller's if it has one: `--device-memory`, or the memory that the platform has reported. On
    platforms that report none, such as CPUs, the devices of this host share its memory equally.
    """
    reported = backend.memory_stats(ordinal)
    limit = known.get("bytes_limit") or reported.get("bytes_limit")
    return known | reported | {"bytes_limit": limit or machine_memory() // len(backend.describe())}
