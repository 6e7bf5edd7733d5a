"""Sparse exchanges between hosts: rows whose number only the devices know (sections 4.3 and 6.3 of the paper).

As for `ir.exchange`, each host works out for itself what it sends and gets. One message goes from each host that holds
rows to each host that may get some, whatever the number of shards. It begins with how many rows of each group follow,
so it tells its receiver that all has come from there, too; where none do, it is nothing else.
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

# Of a sizes array (`atoll.ir.program.Route`), and of a spans array: the first row and the number of rows.
SIZES = "int32"
NO_ROWS = ("token", "opaque", "string")
# As many as an array that is routed may have shards; a host looks at each that it sends or gets.
MAX_GROUPS = 1 << 14


class RowSpan(NamedTuple):
    """`number` rows of a group: from row `source` of it on where they lie, from row `target` of it on where they go.
    A message begins with one for each of its groups.
    """

    source: int
    target: int
    number: int


class RowPiece(NamedTuple):
    """What may go from a box of the source to a box of the target."""

    origin: int  # the position of the source's shard
    source: Box
    target: Box


class HostMessage(NamedTuple):
    """What one host sends to another: rows of these groups, piece by piece, and in each group by group.

    `holders` has for each group a position whose shard has rows of it.
    """

    groups: tuple[int, ...]
    holders: tuple[int, ...]
    pieces: tuple[RowPiece, ...]


class RowExchange(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """Of each group of rows in `source`, some become rows of the same group in `target`; see `program.Route`.

    `destination` is the column of the sizes array, which says how many; -1 where a spans array says it, as for rows on
    their way back. Messages are feeds of the program, numbered from `first` on.
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
        """How many numbers are taken: where a replica on another host sends instead, a host's is not used."""
        return len(self.source_hosts) * len(self.target_hosts)

    @property
    def source_rows(self) -> int:
        """Of each group."""
        return self.source.shape[0] // self.groups

    @property
    def target_rows(self) -> int:
        """Of each group, at most: its capacity."""
        return self.target.shape[0] // self.groups

    @cached_property
    def senders(self) -> tuple[int, ...]:
        if not self._has_replicas:
            return self.source_hosts
        return tuple(sorted({host for target in self.target_hosts for host in self._boxes_to(target)}))

    def sent(self, host: int) -> tuple[tuple[int, int], ...]:
        """The messages of a host: (to which host, feed)."""
        return tuple((to, self._feed(host, to)) for to in self.target_hosts if host in self._boxes_to(to))

    def received(self, host: int) -> tuple[tuple[int, int], ...]:
        """The messages to a host: (from which host, feed)."""
        return tuple((sender, self._feed(sender, host)) for sender in sorted(self._boxes_to(host)))

    def feeds_to(self, positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """The numbers of what a host may get that has the target's shards at these positions: (first, count)."""
        each = len(self.source_hosts)
        return ((self.first + self.target_hosts.index(self.target.host_of[positions[0]]) * each, each),)

    def message(self, sender: int, receiver: int) -> HostMessage:
        """What the message from one host to another has, as both know it."""
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
        """In the order of their bytes: (piece, first row in the array where it lies, and where it goes, number).

        `spans` are of the message's groups, in their order.
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
        """Raises INVALID_ARGUMENT for rows that are not there, or have no room."""
        source, target, number = span
        room = min(self.source_rows - source, self.target_rows - target)
        if min(source, target, number) < 0 or number > room:
            raise invalid(
                f"{number} rows of group {group}, from row {source} on, are to go to row {target} on; the group has "
                f"{self.source_rows} rows, and where they go there is room for {self.target_rows}"
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
        """By host: the source's boxes that it sends of, to this one. Replicas share the load, the receiver's first."""
        found = self._senders_to.get(receiver)
        if found is None:
            found = self._senders_to[receiver] = {}
            turn = self.target_hosts.index(receiver)
            for box, origins in self.source.grid.origins.items():
                if any(start >= stop for start, stop in box):
                    continue
                hosts = sorted({self.source.host_of[origin] for origin in origins})
                host = receiver if receiver in hosts else hosts[turn % len(hosts)]
                found.setdefault(host, []).append(box)
        return found

    @cached_property
    def _messages(self) -> dict[tuple[int, int], HostMessage]:
        return {}

    @cached_property
    def _senders_to(self) -> dict[int, dict[int, list[Box]]]:
        return {}

    def _may_meet(self, source: Box, target: Box) -> bool:
        """Whether any row of the one may become one of the other."""
        if any(start >= stop for start, stop in (*target, *common(source[1:], target[1:]))):
            return False
        theirs = groups_of(target, self.target_rows)
        return any(group in theirs for group in groups_of(source, self.source_rows))


def groups_of(box: Box, rows: int) -> range:
    """The groups, of so many rows each, of which a box has some."""
    start, stop = box[0]
    return range(start // rows, -(-stop // rows)) if start < stop else range(0)


def check_route(inputs: Sequence[ArraySpec], outputs: Sequence[ArraySpec], groups: int, *, is_back: bool) -> None:
    """Raises INVALID_ARGUMENT unless these are the arrays of a Route, or with `is_back` of an Unroute."""
    sources, targets = (outputs, inputs) if is_back else (inputs, outputs)
    pairs = list(zip(targets[::2], targets[1::2], strict=False))
    if groups < 1 or len(targets) % 2 or not pairs or len(sources) not in ((1,) if is_back else (2, 3)):
        raise invalid("rows are routed from one array, its sizes and maybe an order to blocks and their spans, or back")
    if groups > MAX_GROUPS:
        raise invalid(f"rows in {groups} groups; at most {MAX_GROUPS} are allowed")
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
        raise invalid(f"{spec.dtype}{list(spec.shape)} has no rows in {groups} groups of one size")
    if not isinstance(spec.sharding.tiling, Replicated | Tiled):
        raise invalid("rows that are routed are replicated or tiled")


def in_order(rows: ArraySpec, order: ArraySpec) -> ArraySpec:
    """What rows would be if they lay in an order, where they are."""
    return msgspec.structs.replace(rows, shape=(math.prod(order.shape), *rows.shape[1:]))


def _check_order(order: ArraySpec, sizes: ArraySpec, rows: ArraySpec, groups: int) -> None:
    """Each shard has all rows of its groups, and their places."""
    places = order.shape[-1] if len(order.shape) == 2 else 0
    _check_numbers(order, rows, (groups, places), groups)
    if not places or order.sharding != sizes.sharding:
        raise invalid("the order of rows has places for them, and lies as their sizes do")
    whole = _whole_groups(rows, groups)
    if None in whole or whole != _whole_groups(in_order(rows, order), groups):
        raise invalid("rows that have an order lie with all of their group in one shard")


def _whole_groups(rows: ArraySpec, groups: int) -> list[tuple[int, int] | None]:
    """Of each shard: the first group and the number of groups, where it has all of them."""
    each = rows.shape[0] // groups
    bounds = [box[0] for box in shard_boxes(rows.sharding, rows.shape)]
    return [None if start % each or stop % each else (start // each, (stop - start) // each) for start, stop in bounds]


def _check_numbers(spec: ArraySpec, rows: ArraySpec, shape: tuple[int, int], groups: int) -> None:
    """Each device has the numbers of all groups of which it has rows."""
    if (spec.dtype, spec.shape) != (SIZES, shape) or spec.sharding.devices != rows.sharding.devices:
        raise invalid(
            f"the numbers of rows that are routed are {SIZES}{list(shape)} on the rows' devices, and not "
            f"{spec.dtype}{list(spec.shape)}"
        )
    if not isinstance(spec.sharding.tiling, Replicated | Tiled):
        raise invalid("numbers of rows are replicated or tiled")
    each = rows.shape[0] // groups
    for mine, known in zip(shard_boxes(rows.sharding, rows.shape), shard_boxes(spec.sharding, spec.shape), strict=True):
        here = groups_of(mine, each)
        if here and not (known[0][0] <= here[0] and here[-1] < known[0][1] and known[1] == (0, shape[1])):
            raise invalid("a device has rows of a group, and not the group's numbers")
