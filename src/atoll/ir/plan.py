"""The plan: one host's part of a program, in the words of that host's own devices.

A worker keeps a plan under its number and runs it at each launch, segment by segment, as the controller dispatches
the program's gangs. Values carry the numbers that lowering gave them.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from atoll.ir.exchange import Exchange, ReceivePiece, SendPiece
from atoll.ir.row_exchange import RowExchange
from atoll.ir.types import Box, Shape


class LocalArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a logical buffer that one host holds.

    `devices` are ordinals among the host's devices; `positions[i]` is the index of local shard i in the whole
    sharding's device list; `shard_shapes` has one shape a local shard.
    """

    dtype: str
    shape: Shape
    shard_shapes: tuple[Shape, ...]
    devices: tuple[int, ...]
    positions: tuple[int, ...]
    memory_kind: str = ""
    layout: tuple[int, ...] | None = None


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="exec", gc=False):
    """Enqueues a compiled function; its outputs become values `first_output`, `first_output` + 1, ..."""

    function: str
    inputs: tuple[int, ...]
    first_output: int
    donated: tuple[int, ...]
    preserved: tuple[int, ...]
    completion: bool


class Python(msgspec.Struct, frozen=True, array_like=True, tag="python", gc=False):
    """Calls a function of colocated Python, in the order of `stream`; its outputs are there once it has returned.

    `arguments` are (position, value), and `results` (position, value, array), of those that have shards on this host.
    Value `completion` is the call's own; -1 where nobody asked for it.
    """

    function: str
    stream: int
    arguments: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int, LocalArray], ...]
    completion: int


class HostPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Local shard `shard` is `box` of the feed's buffer (None: all of it)."""

    shard: int
    feed: int
    shape: Shape
    strides: tuple[int, ...] | None
    box: Box | None


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put", gc=False):
    """Makes the local shards of an array out of bytes that have arrived at the data port."""

    output: int
    array: LocalArray
    pieces: tuple[HostPiece, ...]


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get", gc=False):
    """Delivers an array to the client's proxy: local shard `shards[i]` is `boxes[i]` of the whole `shape`.

    Value `completion` is ready once that is done.
    """

    input: int
    completion: int
    feed: int
    shape: Shape
    strides: tuple[int, ...] | None
    shards: tuple[int, ...]
    boxes: tuple[Box, ...]


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report", gc=False):
    """Tells the controller what an array of one element is, once it is ready; every shard holds it."""

    input: int


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move", gc=False):
    """Copies shard by shard to other devices or memories of this host."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arrays: tuple[LocalArray, ...]
    donate: bool


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send", dict=True):
    """Hands parts of an array to other hosts (or to this one), once the array is ready.

    This host has the shards at `positions` of the exchange's source.
    """

    input: int
    positions: tuple[int, ...]
    exchange: Exchange

    @cached_property
    def pieces(self) -> tuple[SendPiece, ...]:
        return self.exchange.sent(self.positions)


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive", dict=True):
    """Puts an array together out of the pieces that its senders sent: this host's part of the exchange's target."""

    output: int
    array: LocalArray
    exchange: Exchange

    @cached_property
    def pieces(self) -> tuple[ReceivePiece, ...]:
        return self.exchange.received(self.array.positions)

    @cached_property
    def feeds(self) -> list[int]:
        return [piece.feed for piece in self.pieces]

    def may_get(self) -> tuple[tuple[int, int], ...]:
        """Ranges of feeds that may be for it: (first, count)."""
        return self.exchange.feeds_to(self.array.positions)


class SendRows(msgspec.Struct, frozen=True, array_like=True, tag="send rows", dict=True):
    """Hands rows to other hosts (or to this one), once they and their numbers are ready: a part of sparse exchanges.

    `inputs` are the rows, their numbers, and the order in which they are sent where they do not lie so. This host has
    the shards at `positions` of each: of numbers and order, shard i begins with group `first_groups[i]`.
    """

    inputs: tuple[int, ...]
    positions: tuple[int, ...]
    first_groups: tuple[int, ...]
    exchanges: tuple[RowExchange, ...]

    @cached_property
    def host(self) -> int:
        """That which sends, by its number in the cluster."""
        return self.exchanges[0].source.host_of[self.positions[0]]

    @cached_property
    def messages(self) -> tuple[tuple[RowExchange, int, int], ...]:
        """What goes out: (by which exchange, to which host, feed)."""
        return tuple((each, to, feed) for each in self.exchanges for to, feed in each.sent(self.host))


class ReceiveRows(msgspec.Struct, frozen=True, array_like=True, tag="receive rows", dict=True):
    """Puts an array together out of the rows that came by some exchanges: their target. Of a route's block, the spans
    are value `spans`; otherwise that is -1.
    """

    output: int
    array: LocalArray
    spans: int
    spans_array: LocalArray | None
    exchanges: tuple[RowExchange, ...]

    @cached_property
    def host(self) -> int:
        """That which receives, by its number in the cluster."""
        return self.exchanges[0].target.host_of[self.array.positions[0]]

    @cached_property
    def messages(self) -> tuple[tuple[RowExchange, int, int], ...]:
        """What comes: (by which exchange, from which host, feed)."""
        return tuple((each, sender, feed) for each in self.exchanges for sender, feed in each.received(self.host))

    @cached_property
    def feeds(self) -> list[int]:
        return [feed for _, _, feed in self.messages]

    def may_get(self) -> tuple[tuple[int, int], ...]:
        """Ranges of feeds that may be for it: (first, count)."""
        return tuple(each for exchange in self.exchanges for each in exchange.feeds_to(self.array.positions))


class Take(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next local shard of the output is local shard `shard` of input `input`."""

    input: int
    shard: int


class Select(msgspec.Struct, frozen=True, array_like=True, tag="select", gc=False):
    """Makes one array out of shards that are already here, without copying."""

    inputs: tuple[int, ...]
    output: int
    array: LocalArray
    takes: tuple[Take, ...]
    bitcast: bool


Step = Execute | Python | Put | Get | Report | Move | Send | Receive | SendRows | ReceiveRows | Select

# What each step is for, as traces name it.
STEP_KINDS: dict[type[Step], str] = {
    Execute: "call",
    Python: "python",
    Put: "put",
    Get: "get",
    Report: "report",
    Move: "move",
    Send: "send",
    Receive: "receive",
    SendRows: "send rows",
    ReceiveRows: "receive rows",
    Select: "rearrange",
}


def uses(step: Step) -> tuple[int, ...]:
    """The values that the step reads."""
    match step:
        case Execute(inputs=inputs) | Move(inputs=inputs) | SendRows(inputs=inputs):
            return inputs
        case Python(arguments=arguments):
            return tuple(value for _, value in arguments)
        case Get(input=value) | Report(input=value) | Send(input=value):
            return (value,)
        case Select(inputs=inputs, takes=takes):
            return tuple({inputs[take.input]: None for take in takes})
    return ()


def consumes(step: Step) -> tuple[int, ...]:
    """The values whose memory the step may write its outputs over."""
    match step:
        case Execute(inputs=inputs, donated=donated):
            return tuple(inputs[position] for position in donated)
        case Move(inputs=inputs, donate=True):
            return inputs
    return ()


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A host's part in one gang of the program: what it does once that gang is dispatched.

    `gang` is the gang's index among the program's. `awaited` are the client's feeds that its steps take from this
    host's data port, and which have arrived when the segment starts. Steps wait for those of other hosts.
    """

    gang: int
    steps: tuple[Step, ...]
    results: tuple[int, ...] = ()  # of the program, that it defines
    drops: tuple[int, ...] = ()  # values that no later segment uses
    awaited: tuple[int, ...] = ()
    collective: bool = False  # it computes something together with other hosts of the island


class Plan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One host's part of a program: its segments, in the order of the program's gangs.

    `arguments` and `results` are values; a run brings one handle for each.
    """

    name: str
    arguments: tuple[int, ...]
    segments: tuple[Segment, ...]
    results: tuple[int, ...]
