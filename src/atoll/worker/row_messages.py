"""What hosts send one another in a sparse exchange: how many rows there are of each group, and the rows.

A message is three int32 numbers for each of its groups (`ir.row_exchange.RowSpan`), and then the rows, of one piece
after the other. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from atoll.errors import Code, StatusError
from atoll.host_services import host_data
from atoll.ir import plan as p
from atoll.ir.exchange import common, relative
from atoll.ir.row_exchange import HostMessage, RowExchange, RowPiece, RowSpan
from atoll.ir.types import Box
from atoll.transfers.copies import copy_all
from atoll.transfers.dtypes import numpy_dtype
from atoll.transfers.landing_memory import Range

Array = np.ndarray[Any, Any]
# As `LandingMemory.take_zeros`.
TakeZeros = Callable[[int, Iterable[Range]], np.ndarray[Any, np.dtype[np.uint8]]]
_SPAN = np.dtype("<i4")
SPAN_BYTES = 3 * _SPAN.itemsize


def packed(
    step: p.SendRows, exchange: RowExchange, to: int, shards: Sequence[Array], numbers: Sequence[Array]
) -> list[Any]:
    """The message of an exchange to a host: buffers, one after the other. They refer to the shards.

    Raises INVALID_ARGUMENT where the numbers of rows do not fit.
    """
    message = exchange.message(step.host, to)
    local = {position: shard for shard, position in enumerate(step.positions)}
    spans = []
    for group, holder in zip(message.groups, message.holders, strict=True):
        shard = local[holder]
        span = _span(exchange, numbers[shard][group - step.first_groups[shard]])
        exchange.check(group, span)
        spans.append(span)
    buffers: list[Any] = [np.array(spans, _SPAN).reshape(-1).data]
    for piece, first, _, count in exchange.parts(message, spans):
        part = shards[local[piece.origin]][_rows(first - piece.source[0][0], count, _shared(piece), piece.source)]
        buffers.append(host_data.bytes_of(np.ascontiguousarray(part)))
    return buffers


class _Arrived(NamedTuple):
    """Rows of a piece: where they go, and their bytes."""

    first: int
    number: int
    columns: Box
    content: memoryview


def unpacked(
    step: p.ReceiveRows, contents: Sequence[Any], take_zeros: TakeZeros
) -> tuple[list[Array], list[Array], int]:
    """The shards of the array that is received, those of its spans, if it has any, and how many bytes came.

    `contents` are the messages, in the order of `step.feeds`, each in one buffer, or in those of `packed`. Raises
    INTERNAL for what no worker sends.
    """
    dtype = numpy_dtype(step.array.dtype)
    target = step.exchanges[0].target
    arrived: dict[Box, list[_Arrived]] = {target.boxes[position]: [] for position in step.array.positions}
    spans_of: dict[int, RowSpan] = {}
    nbytes = 0
    for (exchange, sender, _), content in zip(step.messages, contents, strict=True):
        message = exchange.message(sender, step.host)
        views = _views(content)
        nbytes += sum(view.nbytes for view in views)
        spans = _read_spans(exchange, message, views[0])
        spans_of.update(zip(message.groups, spans, strict=True))
        number, at = 0, SPAN_BYTES * len(spans)
        for piece, _, first, count in exchange.parts(message, spans):
            columns = _shared(piece)
            size = math.prod(_shape(columns)) * count * dtype.itemsize
            if at == views[number].nbytes and number + 1 < len(views):
                number, at = number + 1, 0
            _check(at + size <= views[number].nbytes, sender)
            rows = _Arrived(first - piece.target[0][0], count, columns, views[number][at : at + size])
            arrived[piece.target].append(rows)
            at += size
        _check((number + 1, at) == (len(views), views[-1].nbytes), sender)
    made = {box: _made(box, dtype, parts, take_zeros) for box, parts in arrived.items()}
    shards, given = [], set()
    for position in step.array.positions:
        box = target.boxes[position]
        shards.append(host_data.copied(made[box]) if box in given else made[box])  # one device may write over its own
        given.add(box)
    return shards, _spans_shards(step, spans_of), nbytes


def _made(box: Box, dtype: np.dtype[Any], parts: Sequence[_Arrived], take_zeros: TakeZeros) -> Array:
    """The shard of these rows, and of zeros."""
    shape = _shape(box)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    written = [(part.first * row_bytes, (part.first + part.number) * row_bytes) for part in parts]
    array = take_zeros(math.prod(shape) * dtype.itemsize, written).view(dtype).reshape(shape)
    for part in parts:
        if part.columns != box[1:]:  # others may have the rest of these rows, or nobody
            array[part.first : part.first + part.number] = 0
    places = [array[_rows(part.first, part.number, part.columns, box)] for part in parts]
    copy_all(
        [
            (np.frombuffer(part.content, dtype).reshape(place.shape), place)
            for part, place in zip(parts, places, strict=True)
        ]
    )
    return array


def _views(content: Any) -> list[memoryview]:
    buffers = content if isinstance(content, list) else [content]
    return [memoryview(each).cast("B") for each in buffers]


def _spans_shards(step: p.ReceiveRows, spans_of: dict[int, RowSpan]) -> list[Array]:
    if step.spans_array is None:
        return []
    whole = np.zeros((step.exchanges[0].groups, 2), np.int32)
    for group, span in spans_of.items():
        whole[group] = span.source, span.number
    return [host_data.copied(whole) for _ in step.spans_array.devices]


def _span(exchange: RowExchange, numbers: Array) -> RowSpan:
    """From a row of a sizes array, or of a spans array."""
    if exchange.destination >= 0:
        before = numbers[: exchange.destination].sum(dtype=np.int64)
        return RowSpan(int(before), 0, int(numbers[exchange.destination]))
    return RowSpan(0, int(numbers[0]), int(numbers[1]))


def _read_spans(exchange: RowExchange, message: HostMessage, view: memoryview) -> list[RowSpan]:
    _check(view.nbytes >= SPAN_BYTES * len(message.groups), -1)
    numbers = np.frombuffer(view[: SPAN_BYTES * len(message.groups)], _SPAN).reshape(-1, 3).tolist()
    spans = [RowSpan(*each) for each in numbers]
    for group, span in zip(message.groups, spans, strict=True):
        exchange.check(group, span)
    return spans


def _check(is_right: bool, sender: int) -> None:
    if not is_right:
        raise StatusError(Code.INTERNAL, f"rows of host {sender} are not as many as it says")


def _shared(piece: RowPiece) -> Box:
    """What the two boxes have in common beside rows."""
    return common(piece.source[1:], piece.target[1:])


def _rows(first: int, count: int, shared: Box, box: Box) -> tuple[slice, ...]:
    """Rows of a shard that holds `box`, as indices into the shard."""
    return (slice(first, first + count), *(slice(a, b) for a, b in relative(shared, box[1:])))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
