"""Messages between hosts in a sparse exchange.

A message contains three int32 numbers per group (`ir.row_exchange.RowSpan`), followed by the rows of each piece. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from atoll.errors import Code, StatusError, invalid
from atoll.host_services import host_data
from atoll.host_services.host_data import bytes_of
from atoll.host_services.slabs import ArrayContents
from atoll.ir import plan as p
from atoll.ir.exchange import common, relative
from atoll.ir.row_exchange import HostMessage, RowExchange, RowPiece, RowSpan, groups_of
from atoll.ir.types import Box, Shape
from atoll.transfers.dtypes import numpy_dtype
from atoll.transfers.host_memory import copy_all
from atoll.transfers.piece_contents import BufferContents, Joined
from atoll.transfers.receive_buffer_pool import Range

Array = np.ndarray[Any, Any]
# The type of `ReceiveBufferPool.take_zeros`.
TakeZeros = Callable[[int, Iterable[Range]], np.ndarray[Any, np.dtype[np.uint8]]]
_SPAN = np.dtype("<i4")
SPAN_BYTES = 3 * _SPAN.itemsize


class Rows:
    """Rows of an array, either all rows or those in `index`, as the `Contents` of a piece.

    Rows are gathered when they are written. The array must not change before.
    """

    __slots__ = ("_array", "_index", "nbytes", "shape")

    def __init__(self, array: Array, index: Array | None = None) -> None:
        self._array = array
        self._index = index
        self.shape: tuple[int, ...] = array.shape if index is None else (len(index), *array.shape[1:])
        self.nbytes = array.nbytes // max(1, len(array)) * self.shape[0]

    def copy_to(self, place: Array) -> None:
        array = self._array
        if array.flags.c_contiguous and place.flags.c_contiguous:
            # Copy bytes, because NumPy holds the GIL when it copies some dtypes, such as bfloat16.
            array, place = _row_bytes(array), _row_bytes(place)
            if self._index is not None:  # mode="clip" avoids a copy; all indices are in range
                np.take(array, self._index, axis=0, out=place, mode="clip")
                return
        place[...] = array if self._index is None else array[self._index]

    def views(self) -> Sequence[memoryview]:
        return self.slice(0, self.nbytes)

    def slice(self, start: int, stop: int) -> Sequence[memoryview]:
        if self._index is None:
            return ArrayContents(self._array).slice(start, stop)
        size = self.nbytes // len(self._index)
        first, last = start // size, -(-stop // size)
        found = memoryview(bytes_of(np.ascontiguousarray(self._array[self._index[first:last]])))
        return (found[start - first * size : stop - first * size],)

    def write_into(self, target: memoryview) -> None:
        self.copy_to(np.ndarray(self.shape, self._array.dtype, buffer=target))


class RowMessage(Joined):
    """The spans of a message's groups, followed by the rows."""

    __slots__ = ("numbers", "rows")

    def __init__(self, numbers: Array, rows: Sequence[Rows]) -> None:
        self.numbers = memoryview(bytes_of(numbers))
        self.rows = rows
        super().__init__([BufferContents([self.numbers]), *rows])


def packed(step: p.SendRows, exchange: RowExchange, to: int, inputs: Sequence[Sequence[Array]]) -> RowMessage:
    """Return the message to a host from this host's shards of the step's inputs. The message refers to the shards.

    Raises INVALID_ARGUMENT if the numbers of rows or their order do not fit the exchange.
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
    """Return the indices in a shard, which holds `groups` and has `rows` rows, of a group's rows in `order`."""
    each = rows // len(groups)
    if order.min() < 0 or order.max() >= each:
        raise invalid(f"cannot send rows {order.min()} to {order.max()} of group {group}, which has {each} rows")
    index: Array = order + (group - groups.start) * np.intp(each)
    return index


class _Arrived(NamedTuple):
    """The rows of a piece and their position in a shard."""

    first: int
    columns: Box
    rows: Rows

    @property
    def stop(self) -> int:
        return self.first + self.rows.shape[0]


def unpacked(
    step: p.ReceiveRows, contents: Sequence[Any], take_zeros: TakeZeros
) -> tuple[list[Array], list[Array], int]:
    """Return the shards of the received array, the shards of its spans array (if any) and the received bytes.

    `contents` are the messages in the order of `step.feeds`, as bytes or as returned by `packed`. Raises INTERNAL if a
    message is inconsistent, which workers never send.
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
        # Copy for further devices, because a device may overwrite its shard.
        shards.append(host_data.copied(made[box]) if box in given else made[box])
        given.add(box)
    return shards, _spans_shards(step, spans_of), nbytes


def _made(box: Box, dtype: np.dtype[Any], parts: Sequence[_Arrived], take_zeros: TakeZeros) -> Array:
    """Return a shard with the given rows, and with zeros elsewhere."""
    shape = _shape(box)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    written = [(part.first * row_bytes, part.stop * row_bytes) for part in parts]
    array = take_zeros(math.prod(shape) * dtype.itemsize, written).view(dtype).reshape(shape)
    for part in parts:
        if part.columns != box[1:]:  # other parts may or may not contain the rest of these rows
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
    """Return the span of a group from its row of a sizes array or of a spans array."""
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
        raise StatusError(Code.INTERNAL, f"host {sender} sent a different number of rows than it announced")


def _shared(piece: RowPiece) -> Box:
    """Return the intersection of the piece's two boxes without the dimension of rows."""
    return common(piece.source[1:], piece.target[1:])


def _columns(shared: Box, box: Box) -> tuple[slice, ...]:
    """Return `shared`, which lacks the dimension of rows, as indices into a shard that holds `box`."""
    return tuple(slice(start, stop) for start, stop in relative(shared, box[1:]))


def _shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def _row_bytes(array: Array) -> Array:
    return array.reshape(len(array), -1).view(np.uint8)
