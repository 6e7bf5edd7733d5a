"""The results of lowering: gangs, and one plan per host, which refers to devices by their ordinals on the host.

A worker stores a plan under its number. At each launch, it runs the plan segment by segment, as the controller
dispatches the program's gangs.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from atoll.cluster.locations import MemoryRequirement
from atoll.ir.exchange import Exchange, ReceivePiece, SendPiece
from atoll.ir.row_exchange import RowExchange
from atoll.ir.types import DTYPE_BITS, Box, Shape


class LocalArray(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a logical buffer on one host.

    `devices` are ordinals of the host's devices. Local shard i has the shape `shard_shapes[i]`, and is at
    `positions[i]` in the device list of the whole sharding.
    """

    dtype: str
    shape: Shape
    shard_shapes: tuple[Shape, ...]
    devices: tuple[int, ...]
    positions: tuple[int, ...]
    memory_kind: str = ""
    layout: tuple[int, ...] | None = None


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="exec", gc=False):
    """Enqueues a compiled function. Its outputs become values `first_output`, `first_output` + 1, ..."""

    function: str
    inputs: tuple[int, ...]
    first_output: int
    donated: tuple[int, ...]
    preserved: tuple[int, ...]
    completion: bool


class Python(msgspec.Struct, frozen=True, array_like=True, tag="python", gc=False):
    """Calls a function of colocated Python, in the order of `stream`. Its outputs are ready when it returns.

    `arguments` (position, value) and `results` (position, value, array) are those with shards on this host. Value
    `completion` is the completion of the call; -1 if it was not requested.
    """

    function: str
    stream: int
    arguments: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int, LocalArray], ...]
    completion: int


class HostPiece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`box` of the feed's buffer (None for the whole buffer), which is the contents of local shard `shard`."""

    shard: int
    feed: int
    shape: Shape
    strides: tuple[int, ...] | None
    box: Box | None


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put", gc=False):
    """Makes the local shards of an array from bytes that have arrived at the data port."""

    output: int
    array: LocalArray
    pieces: tuple[HostPiece, ...]


class PutAll(msgspec.Struct, frozen=True, array_like=True, tag="put all", gc=False):
    """Makes arrays, each on one device, from one feed that has their contents one after the other."""

    outputs: tuple[int, ...]
    arrays: tuple[LocalArray, ...]
    feed: int


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get", gc=False):
    """Sends an array to the client's proxy: local shard `shards[i]` is `boxes[i]` of the array of shape `shape`.

    Value `completion` is ready when everything is sent.
    """

    input: int
    completion: int
    feed: int
    shape: Shape
    strides: tuple[int, ...] | None
    shards: tuple[int, ...]
    boxes: tuple[Box, ...]


class GetAll(msgspec.Struct, frozen=True, array_like=True, tag="get all", gc=False):
    """Sends shards of several arrays to the client's proxy, one after the other: `shards[i]` of array `inputs[i]`.

    Shards have local numbers. Value `completion` is ready when everything is sent.
    """

    inputs: tuple[int, ...]
    completion: int
    feed: int
    shards: tuple[int, ...]


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report", gc=False):
    """Reports the value of a replicated array with one element to the controller, when it is ready."""

    input: int


class Move(msgspec.Struct, frozen=True, array_like=True, tag="move", gc=False):
    """Copies each shard to another device or memory of this host."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arrays: tuple[LocalArray, ...]
    donate: bool


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send", dict=True):
    """Sends parts of an array to other hosts (or to this one), when the array is ready.

    This host has the shards at `positions` of the exchange's source.
    """

    input: int
    positions: tuple[int, ...]
    exchange: Exchange

    @cached_property
    def pieces(self) -> tuple[SendPiece, ...]:
        return self.exchange.sent(self.positions)

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """The number of elements of each piece."""
        return tuple([math.prod([stop - start for start, stop in piece.box]) for piece in self.pieces])

    @cached_property
    def by_host(self) -> dict[int, int]:
        """The number of elements that each host receives."""
        found: dict[int, int] = {}
        for piece, count in zip(self.pieces, self.elements, strict=True):
            found[piece.host] = found.get(piece.host, 0) + count
        return found


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive", dict=True):
    """Makes this host's part of the exchange's target from the pieces that it receives."""

    output: int
    array: LocalArray
    exchange: Exchange

    @cached_property
    def pieces(self) -> tuple[ReceivePiece, ...]:
        return self.exchange.received(self.array.positions)

    @cached_property
    def nbytes(self) -> int:
        """The size of this host's part, at least one byte per element."""
        return sum(map(math.prod, self.array.shard_shapes)) * max(1, DTYPE_BITS.get(self.array.dtype, 8) // 8)

    @cached_property
    def feeds(self) -> list[int]:
        return [piece.feed for piece in self.pieces]

    def may_get(self) -> tuple[tuple[int, int], ...]:
        """Return ranges of feeds that may be for this step: (first, count)."""
        return self.exchange.feeds_to(self.array.positions)


class SendRows(msgspec.Struct, frozen=True, array_like=True, tag="send rows", dict=True):
    """Sends rows to other hosts (or to this one), when the inputs are ready: this host's part of sparse exchanges.

    `inputs` are the rows, their sizes or spans, and optionally their order. This host has the shards at `positions` of
    each. Shard i of sizes, spans and order starts with group `first_groups[i]`.
    """

    inputs: tuple[int, ...]
    positions: tuple[int, ...]
    first_groups: tuple[int, ...]
    exchanges: tuple[RowExchange, ...]

    @cached_property
    def host(self) -> int:
        """The number of this host in the cluster."""
        return self.exchanges[0].source.host_of[self.positions[0]]

    @cached_property
    def messages(self) -> tuple[tuple[RowExchange, int, int], ...]:
        """The messages that it sends: (exchange, receiver, feed)."""
        return tuple((each, to, feed) for each in self.exchanges for to, feed in each.sent(self.host))


class ReceiveRows(msgspec.Struct, frozen=True, array_like=True, tag="receive rows", dict=True):
    """Makes this host's part of the target of some exchanges from the rows that it receives.

    If the target is a block of a route, its spans are value `spans`; otherwise, `spans` is -1.
    """

    output: int
    array: LocalArray
    spans: int
    spans_array: LocalArray | None
    exchanges: tuple[RowExchange, ...]

    @cached_property
    def host(self) -> int:
        """The number of this host in the cluster."""
        return self.exchanges[0].target.host_of[self.array.positions[0]]

    @cached_property
    def messages(self) -> tuple[tuple[RowExchange, int, int], ...]:
        """The messages that it receives: (exchange, sender, feed)."""
        return tuple((each, sender, feed) for each in self.exchanges for sender, feed in each.received(self.host))

    @cached_property
    def feeds(self) -> list[int]:
        return [feed for _, _, feed in self.messages]

    def may_get(self) -> tuple[tuple[int, int], ...]:
        """Return ranges of feeds that may be for this step: (first, count)."""
        return tuple(each for exchange in self.exchanges for each in exchange.feeds_to(self.array.positions))


class Take(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next local shard of the output is local shard `shard` of input `input`."""

    input: int
    shard: int


class Select(msgspec.Struct, frozen=True, array_like=True, tag="select", gc=False):
    """Makes an array from shards on this host, without copying."""

    inputs: tuple[int, ...]
    output: int
    array: LocalArray
    takes: tuple[Take, ...]
    bitcast: bool


Step = Execute | Python | Put | PutAll | Get | GetAll | Report | Move | Send | Receive | SendRows | ReceiveRows | Select

# The names of steps in traces.
STEP_KINDS: dict[type[Step], str] = {
    Execute: "call",
    Python: "python",
    Put: "put",
    PutAll: "put",
    Get: "get",
    GetAll: "get",
    Report: "report",
    Move: "move",
    Send: "send",
    Receive: "receive",
    SendRows: "send rows",
    ReceiveRows: "receive rows",
    Select: "rearrange",
}


def uses(step: Step) -> tuple[int, ...]:
    """Return the values that the step reads."""
    match step:
        case Execute(inputs=inputs) | GetAll(inputs=inputs) | Move(inputs=inputs) | SendRows(inputs=inputs):
            return inputs
        case Python(arguments=arguments):
            return tuple(value for _, value in arguments)
        case Get(input=value) | Report(input=value) | Send(input=value):
            return (value,)
        case Select(inputs=inputs, takes=takes):
            return tuple({inputs[take.input]: None for take in takes})
    return ()


def consumes(step: Step) -> tuple[int, ...]:
    """Return the values whose memory the step may overwrite with its outputs."""
    match step:
        case Execute(inputs=inputs, donated=donated):
            return tuple(inputs[position] for position in donated)
        case Move(inputs=inputs, donate=True):
            return inputs
    return ()


def device_of(step: Step) -> int:
    """Return a device on which the step makes an array; 0 if it makes none, or runs a function."""
    match step:
        case Put(array=array) | Receive(array=array) | ReceiveRows(array=array) | Select(array=array):
            return array.devices[0]
        case PutAll(arrays=arrays) | Move(arrays=arrays):
            return arrays[0].devices[0]
    return 0


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A host's part of one gang: what it does when the gang is dispatched.

    `gang` is the index of the gang in the program. `awaited` are feeds of the client that steps take from this host's
    data port. They have arrived when the segment starts; steps wait for feeds of other hosts.
    """

    gang: int
    steps: tuple[Step, ...]
    results: tuple[int, ...] = ()  # the program's results that it defines
    drops: tuple[int, ...] = ()  # values that no later segment uses
    awaited: tuple[int, ...] = ()
    collective: bool = False  # it runs a function together with other hosts of the island


class Plan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One host's part of a program: its segments, in the order of the program's gangs.

    `arguments` and `results` are values. A launch has one handle per argument and result.
    """

    name: str
    arguments: tuple[int, ...]
    segments: tuple[Segment, ...]
    results: tuple[int, ...]


class LoweredGang(msgspec.Struct, frozen=True):
    """The part of a node on one island: a gang on these hosts. `node` is its index after simplification."""

    node: int
    island: int
    hosts: tuple[int, ...]
    function: str = ""  # the function that it runs, if any
    collective: bool = False  # its hosts run the function together, so it ends on all of them or on none
    makes: tuple[int, ...] = ()  # values, or their parts on this island
    drops: tuple[int, ...] = ()  # intermediate values that no later gang of this island uses
    colocated: bool = False  # it runs colocated Python, for any time


class LoweredValue(msgspec.Struct, frozen=True):
    """The hosts of a value, and its memory. Views take no memory of their own."""

    hosts: tuple[int, ...]
    nbytes: int = 0  # on all devices together
    memory: MemoryRequirement = ()
    views: frozenset[int] = frozenset()  # the values whose memory it shares


class Lowered(msgspec.Struct, frozen=True):
    """A program's gangs, in order, and its plans, by host.

    Lowering numbers the values again: first the arguments, then the outputs of the remaining nodes in order. Invariant:
    hosts do not wait for each other in a cycle. Segments of earlier gangs, or of the same gang, send what a segment
    receives, and hosts send before they receive.
    """

    gangs: tuple[LoweredGang, ...]
    plans: dict[int, Plan]
    values: tuple[LoweredValue, ...]
    results: tuple[int, ...]  # values
    donated: frozenset[int]  # positions of arguments whose buffers the program consumes
    host_feeds: int  # how many feeds between hosts there are
