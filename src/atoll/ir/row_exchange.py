"""Sparse exchanges between hosts: transfers of rows whose number only the devices know (the paper, 4.3 and 6.3).

As for `ir.exchange`, each host computes what it sends and receives. Each host with rows sends one message to each host
that may get some, independent of the number of shards. The message starts with the number of rows per group, so the
receiver also knows when it has everything. A message without rows contains only these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from atoll.errors import invalid
from atoll.ir.exchange import Spread, common
from atoll.ir.types import ArraySpec, Box, Replicated, Tiled, shard_boxes

# The dtype of sizes, spans and orders: see `atoll.ir.program.Route`.
SIZES = "int32"
NO_ROWS = ("token", "opaque", "string")
# A host visits each group that it sends or receives. A routed array may have as many shards.
MAX_GROUPS = 1 << 14


class RowSpan(NamedTuple):
    """`number` rows of a group, from row `source` of its source to row `target` of its target.

    A message starts with one span per group.
    """

    source: int
    target: int
    number: int


class RowPiece(NamedTuple):
    """The rows that may be sent from a box of the source to a box of the target."""

    origin: int  # the position of the source shard
    source: Box
    target: Box


class HostMessage(NamedTuple):
    """The structure of the message from one host to another: pieces in order, each with its groups in order.

    `holders` contains a position per group whose shard has rows of the group.
    """

    groups: tuple[int, ...]
    holders: tuple[int, ...]
    pieces: tuple[RowPiece, ...]


class RowExchange(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A transfer of some rows of each group in `source` to the same group in `target`: see `program.Route`.

    The sizes array contains the number of rows in column `destination`. For an `Unroute`, `destination` is -1, and a
    spans array contains the numbers. Messages are feeds of the program, numbered from `first`.
    """

    source: Spread
    target: Spread
    groups: int
    destination: int
    first: int

    @cached_property
    def source_hosts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.source.host_of)))

    @cached_property
    def target_hosts(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.target.host_of)))

    @property
    def feeds(self) -> int:
        """How many numbers are reserved. If a replica on another host sends, a host does not use its number."""
        return len(self.source_hosts) * len(self.target_hosts)

    @property
    def source_rows(self) -> int:
        """The number of rows per group in the source."""
        return self.source.shape[0] // self.groups

    @property
    def target_rows(self) -> int:
        """The capacity of each group in the target, in rows."""
        return self.target.shape[0] // self.groups

    @cached_property
    def senders(self) -> tuple[int, ...]:
        if not self._has_replicas:
            return self.source_hosts
        return tuple(sorted({host for target in self.target_hosts for host in self._boxes_to(target)}))

    def sent(self, host: int) -> tuple[tuple[int, int], ...]:
        """Return the messages from a host: (receiver, feed)."""
        return tuple((to, self._feed(host, to)) for to in self.target_hosts if host in self._boxes_to(to))

    def received(self, host: int) -> tuple[tuple[int, int], ...]:
        """Return the messages to a host: (sender, feed)."""
        return tuple((sender, self._feed(sender, host)) for sender in sorted(self._boxes_to(host)))

    def feeds_to(self, positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the feeds that a host with the target shards at these positions may receive: (first, count)."""
        each = len(self.source_hosts)
        return ((self.first + self.target_hosts.index(self.target.host_of[positions[0]]) * each, each),)

    def message(self, sender: int, receiver: int) -> HostMessage:
        """Return the structure of a message, which sender and receiver compute alike."""
        found = self._messages.get((sender, receiver))
        if found is None:
            found = self._messages[sender, receiver] = self._message(sender, receiver)
        return found

    def _message(self, sender: int, receiver: int) -> HostMessage:
        holders: dict[int, int] = {}
        pieces = []
        wanted = dict.fromkeys(
            box for box, host in zip(self.target.boxes, self.target.host_of, strict=True) if host == receiver
        )
        for box in self._boxes_to(receiver).get(sender, ()):
            origin = next(i for i in self.source.grid.origins[box] if self.source.host_of[i] == sender)
            groups = groups_of(box, self.source_rows)
            holders.update((group, origin) for group in groups if group not in holders)
            pieces += [RowPiece(origin, box, target) for target in wanted if self._may_meet(box, target)]
        return HostMessage(tuple(holders), tuple(holders.values()), tuple(pieces))

    def parts(self, message: HostMessage, spans: Sequence[RowSpan]) -> Iterator[tuple[RowPiece, int, int, int]]:
        """Yield the rows of a message in the order of their bytes: (piece, first source row, first target row, number).

        `spans` are those of the message's groups, in order.
        """
        span_of = dict(zip(message.groups, spans, strict=True))
        for piece in message.pieces:
            (source_start, source_stop), (target_start, target_stop) = piece.source[0], piece.target[0]
            for group in groups_of(piece.source, self.source_rows):
                span = span_of[group]
                from_row = group * self.source_rows + span.source
                to_row = group * self.target_rows + span.target
                begin = max(0, source_start - from_row, target_start - to_row)
                end = min(span.number, source_stop - from_row, target_stop - to_row)
                if begin < end:
                    yield piece, from_row + begin, to_row + begin, end - begin

    def check(self, group: int, span: RowSpan) -> None:
        """Raise INVALID_ARGUMENT if the source or the target of a span is out of range."""
        source, target, number = span
        most = min(self.source_rows - source, self.target_rows - target)
        if min(source, target, number) < 0 or number > most:
            raise invalid(
                f"cannot send {number} rows of group {group} from row {source} to row {target}: "
                f"the group has {self.source_rows} rows, and the target's capacity is {self.target_rows}"
            )

    def _feed(self, sender: int, receiver: int) -> int:
        to = self.target_hosts.index(receiver)
        return self.first + to * len(self.source_hosts) + self.source_hosts.index(sender)

    @cached_property
    def _has_replicas(self) -> bool:
        return any(
            len({self.source.host_of[origin] for origin in origins}) > 1
            for origins in self.source.grid.origins.values()
        )

    def _boxes_to(self, receiver: int) -> dict[int, list[Box]]:
        """Return by host the boxes of which it sends rows to the receiver.

        A replica on the receiver is preferred; otherwise, the replicas share the load.
        """
        found = self._senders_to.get(receiver)
        if found is None:
            found = self._senders_to[receiver] = {}
            number = self.target_hosts.index(receiver)
            for box, origins in self.source.grid.origins.items():
                if any(start >= stop for start, stop in box):
                    continue
                hosts = sorted({self.source.host_of[origin] for origin in origins})
                host = receiver if receiver in hosts else hosts[number % len(hosts)]
                found.setdefault(host, []).append(box)
        return found

    @cached_property
    def _messages(self) -> dict[tuple[int, int], HostMessage]:
        return {}

    @cached_property
    def _senders_to(self) -> dict[int, dict[int, list[Box]]]:
        return {}

    def _may_meet(self, source: Box, target: Box) -> bool:
        """Return whether rows of the source box may become rows of the target box."""
        if any(start >= stop for start, stop in (*target, *common(source[1:], target[1:]))):
            return False
        theirs = groups_of(target, self.target_rows)
        return any(group in theirs for group in groups_of(source, self.source_rows))


def groups_of(box: Box, rows: int) -> range:
    """Return the groups, each of `rows` rows, that have rows in the box."""
    start, stop = box[0]
    return range(start // rows, -(-stop // rows)) if start < stop else range(0)


def check_route(inputs: Sequence[ArraySpec], outputs: Sequence[ArraySpec], groups: int, *, is_back: bool) -> None:
    """Raise INVALID_ARGUMENT unless these are the types of a `Route`, or of an `Unroute` if `is_back` is set."""
    sources, targets = (outputs, inputs) if is_back else (inputs, outputs)
    pairs = list(zip(targets[::2], targets[1::2], strict=False))
    if groups < 1 or len(targets) % 2 or not pairs or len(sources) not in ((1,) if is_back else (2, 3)):
        raise invalid(
            "a route takes rows, sizes and optionally an order, and returns blocks and their spans; an unroute takes "
            "blocks and their spans, and returns rows"
        )
    if groups > MAX_GROUPS:
        raise invalid(f"a route has {groups} groups; at most {MAX_GROUPS} are allowed")
    rows = sources[0]
    _check_rows(rows, groups)
    if not is_back:
        _check_numbers(sources[1], rows, (groups, len(pairs)), groups)
    if len(sources) == 3:
        _check_order(sources[2], sources[1], rows, groups)
    for block, spans in pairs:
        _check_rows(block, groups)
        _check_numbers(spans, block, (groups, 2), groups)
        if (block.dtype, block.shape[1:]) != (rows.dtype, rows.shape[1:]):
            raise invalid(
                f"rows of {rows.dtype}{list(rows.shape[1:])} cannot be rows of {block.dtype}{list(block.shape[1:])}"
            )


def _check_rows(spec: ArraySpec, groups: int) -> None:
    if spec.dtype in NO_ROWS or not spec.shape or spec.shape[0] % groups or not spec.shape[0]:
        raise invalid(f"{spec.dtype}{list(spec.shape)} does not have rows in {groups} groups of equal size")
    if not isinstance(spec.sharding.tiling, Replicated | Tiled):
        raise invalid("arrays of a route must be replicated or tiled")


def in_order(rows: ArraySpec, order: ArraySpec) -> ArraySpec:
    """Return the type of `rows` after sorting them into `order`, with the same sharding."""
    return msgspec.structs.replace(rows, shape=(math.prod(order.shape), *rows.shape[1:]))


def _check_order(order: ArraySpec, sizes: ArraySpec, rows: ArraySpec, groups: int) -> None:
    """Check that each shard has all rows of its groups, and their places."""
    places = order.shape[-1] if len(order.shape) == 2 else 0
    _check_numbers(order, rows, (groups, places), groups)
    if not places or order.sharding != sizes.sharding:
        raise invalid("the order of a route must have places, and the sharding of the sizes")
    whole = _whole_groups(rows, groups)
    if None in whole or whole != _whole_groups(in_order(rows, order), groups):
        raise invalid("if a route has an order, each shard must contain whole groups")


def _whole_groups(rows: ArraySpec, groups: int) -> list[tuple[int, int] | None]:
    """Return the first group and the number of groups of each shard; None for a shard with part of a group."""
    each = rows.shape[0] // groups
    bounds = [box[0] for box in shard_boxes(rows.sharding, rows.shape)]
    return [None if start % each or stop % each else (start // each, (stop - start) // each) for start, stop in bounds]


def _check_numbers(spec: ArraySpec, rows: ArraySpec, shape: tuple[int, int], groups: int) -> None:
    """Check an array of sizes, spans or an order: each device must have the numbers of all groups of its rows."""
    if (spec.dtype, spec.shape) != (SIZES, shape) or spec.sharding.devices != rows.sharding.devices:
        raise invalid(
            f"expected sizes, spans or an order of type {SIZES}{list(shape)} on the devices of the rows, not "
            f"{spec.dtype}{list(spec.shape)}"
        )
    if not isinstance(spec.sharding.tiling, Replicated | Tiled):
        raise invalid("sizes, spans and orders of a route must be replicated or tiled")
    each = rows.shape[0] // groups
    for mine, known in zip(shard_boxes(rows.sharding, rows.shape), shard_boxes(spec.sharding, spec.shape), strict=True):
        here = groups_of(mine, each)
        if here and not (known[0][0] <= here[0] and here[-1] < known[0][1] and known[1] == (0, shape[1])):
            raise invalid("a device has rows of a group without the group's sizes, spans or order")
