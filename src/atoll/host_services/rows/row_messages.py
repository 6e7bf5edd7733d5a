"""What hosts send one another in a sparse exchange: how many rows there are of each group, and the rows.

A message is three int32 numbers for each of its groups (`ir.row_exchange.RowSpan`), and then the rows, of one piece
after the other. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from atoll.errors import Code, StatusError, invalid
from atoll.host_services import host_data
from atoll.host_services.rows.row_contents import RowMessage, Rows
from atoll.ir import plan as p
from atoll.ir.exchange import common, relative
from atoll.ir.row_exchange import HostMessage, RowExchange, RowPiece, RowSpan, groups_of
from atoll.ir.types import Box, Shape
from atoll.transfers.dtypes import numpy_dtype
from atoll.transfers.host_memory import copy_all
from atoll.transfers.receive_buffer_pool import Range

Array = np.ndarray[Any, Any]
# As `ReceiveBufferPool.take_zeros`.
TakeZeros = Callable[[int, Iterable[Range]], np.ndarray[Any, np.dtype[np.uint8]]]
_SPAN = np.dtype("<i4")
SPAN_BYTES = 3 * _SPAN.itemsize


def packed(step: p.SendRows, exchange: RowExchange, to: int, inputs: Sequence[Sequence[Array]]) -> RowMessage:
    """The message of an exchange to a host, of this host's shards of the step's inputs. It refers to them.

    Raises INVALID_ARGUMENT where the numbers of rows, or their order, do not fit.
    """
    shards, numbers, *orders = inputs
    message = exchange.message(step.host, to)
    local = {position: shard for shard, position in enumerate(step.positions)}
    spans = []
    for group, holder in zip(message.groups, message.holders, strict=True):
        shard = local[holder]
        span = _span(exchange, numbers[shard][group - step.first_groups[shard]])
        exchange.check(group, span)
        spans.append(span)
    rows = []
    for piece, first, _, count in exchange.parts(message, spans):
        shard = local[piece.origin]
        array = shards[shard][:, *_columns(_shared(piece), piece.source)]
        if orders:
            group, place = divmod(first, exchange.source_rows)
            order = orders[0][shard][group - step.first_groups[shard], place : place + count]
            rows.append(Rows(array, _index(group, order, len(array), groups_of(piece.source, exchange.source_rows))))
        else:
            first -= piece.source[0][0]
            rows.append(Rows(array[first : first + count]))
    return RowMessage(np.array(spans, _SPAN), rows)


def _index(group: int, order: Array, rows: int, groups: range) -> Array:
    """Rows of a group, in an order, as rows of a shard that has so many of these groups."""
    each = rows // len(groups)
    if order.min() < 0 or order.max() >= each:
        raise invalid(f"rows {order.min()} to {order.max()} of group {group} are to be sent, which has {each}")
    index: Array = order + (group - groups.start) * np.intp(each)
    return index


class _Arrived(NamedTuple):
    """Rows of a piece: where they go."""

    first: int
    columns: Box
    rows: Rows

    @property
    def stop(self) -> int:
        return self.first + self.rows.shape[0]


def unpacked(
    step: p.ReceiveRows, contents: Sequence[Any], take_zeros: TakeZeros
) -> tuple[list[Array], list[Array], int]:
    """The shards of the array that is received, those of its spans, if it has any, and how many bytes came.

    `contents` are the messages, in the order of `step.feeds`, as bytes or as `packed` has made them. Raises INTERNAL
    for what no worker sends.
    """
    dtype = numpy_dtype(step.array.dtype)
    target = step.exchanges[0].target
    arrived: dict[Box, list[_Arrived]] = {target.boxes[position]: [] for position in step.array.positions}
    spans_of: dict[int, RowSpan] = {}
    nbytes = 0
    for (exchange, sender, _), content in zip(step.messages, contents, strict=True):
        message = exchange.message(sender, step.host)
        is_own = isinstance(content, RowMessage)
        view = content.numbers if is_own else memoryview(content).cast("B")
        nbytes += content.nbytes if is_own else view.nbytes
        spans = _read_spans(exchange, message, view)
        spans_of.update(zip(message.groups, spans, strict=True))
        parts = list(exchange.parts(message, spans))
        shapes = [(count, *_shape(_shared(piece))) for piece, _, _, count in parts]
        found = content.rows if is_own else _read_rows(view[SPAN_BYTES * len(spans) :], shapes, dtype, sender)
        for (piece, _, first, _), rows in zip(parts, found, strict=True):
            arrived[piece.target].append(_Arrived(first - piece.target[0][0], _shared(piece), rows))
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
    written = [(part.first * row_bytes, part.stop * row_bytes) for part in parts]
    array = take_zeros(math.prod(shape) * dtype.itemsize, written).view(dtype).reshape(shape)
    for part in parts:
        if part.columns != box[1:]:  # others may have the rest of these rows, or nobody
            array[part.first : part.stop] = 0
    copy_all([(part.rows, array[part.first : part.stop, *_columns(part.columns, box)]) for part in parts])
    return array


def _read_rows(view: memoryview, shapes: Sequence[Shape], dtype: np.dtype[Any], sender: int) -> Iterator[Rows]:
    at = 0
    for shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        _check(at + size <= view.nbytes, sender)
        yield Rows(np.frombuffer(view[at : at + size], dtype).reshape(shape))
        at += size
    _check(at == view.nbytes, sender)


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


def _columns(shared: Box, box: Box) -> tuple[slice, ...]:
    """What is shared beside rows, as indices into a shard that holds `box`."""
    return tuple(slice(start, stop) for start, stop in relative(shared, box[1:]))


def _shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)
