"""The program: a dataflow graph over virtual devices, one node per sharded computation.

Values are numbered: the arguments first, then the outputs of the nodes in order. A node stands once whatever its
number of shards. A single `jit` call is a program of one `Call`; a `device_put` to other devices is a program of
one `Transfer`. *Feeds* are the program's host ends: numbered buffers that the client's proxy and a worker
exchange past the controller.
"""

from __future__ import annotations

import msgspec

from atoll.errors import invalid
from atoll.ir.types import ArraySpec, Shape

MAX_SHARDS = 1 << 24  # of one array


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Runs a compiled function, as one gang on all devices of its assignment.

    `donated` are the positions among `inputs` whose buffers the call consumes; `preserved` those that the function
    would consume but that the caller keeps. `stream` is None for what runs on the devices. A function of colocated
    Python runs beside them, takes as long as it likes, and starts after the calls before it of the same stream.
    """

    function: int
    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    devices: tuple[int, ...]
    donated: tuple[int, ...] = ()
    preserved: tuple[int, ...] = ()
    # A last output that is no array but the call's own completion, for callers that asked for its status.
    completion: bool = False
    stream: int | None = None


class HostBuffer(msgspec.Struct, frozen=True, array_like=True):
    """Bytes from the client: `shape` elements, spaced by `strides` bytes (None: row-major without gaps).

    They are the contents of the shards at `positions` of the output's sharding; with `positions` None the buffer
    holds the whole array, of which each shard takes its part.
    """

    feed: int
    shape: Shape
    strides: tuple[int, ...] | None
    positions: tuple[int, ...] | None


class HostToDevice(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Makes one array out of host buffers."""

    buffers: tuple[HostBuffer, ...]
    outputs: tuple[ArraySpec]

    inputs: tuple[int, ...] = ()


class DeviceToHost(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Sends one array's contents to the client, laid out by `strides` (None: row-major without gaps).

    Its one output is no array but its own completion, like a call's.
    """

    inputs: tuple[int]
    feed: int
    strides: tuple[int, ...] | None
    outputs: tuple[ArraySpec, ...] = ()


class Transfer(msgspec.Struct, frozen=True, array_like=True, tag="transfer"):
    """Gives each input the sharding of its output. With `donate` the inputs are consumed."""

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    donate: bool = False
    # False: shard i becomes shard i, on another device or memory. True: the parts differ.
    reshard: bool = False


class Mapping(msgspec.Struct, frozen=True, array_like=True):
    """Shards `source[0]:source[1]:source[2]` of input `input` become shards `target` of output `output`."""

    input: int
    output: int
    source: tuple[int, int, int]
    target: tuple[int, int, int]


class Rearrange(msgspec.Struct, frozen=True, array_like=True, tag="rearrange"):
    """Makes arrays out of the shards of other arrays, which stay where they are: nothing is copied.

    Disassembling, assembling, remapping and taking one shard are all this.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    mappings: tuple[Mapping, ...]
    donate: bool = False
    # The outputs' bytes are read as the outputs' dtype and shape.
    bitcast: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Reports to the controller what its input is: one integer or boolean. See `atoll.ir.control_flow_split`."""

    inputs: tuple[int]
    outputs: tuple[ArraySpec, ...] = ()


class Switch(msgspec.Struct, frozen=True, array_like=True, tag="switch"):
    """Runs the branch that its first input chooses on the other inputs; a number out of range chooses the nearest one.

    Only what a client submits has this node and the next: `atoll.ir.control_flow_split` makes launches of them.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    branches: tuple[Program, ...]


class Loop(msgspec.Struct, frozen=True, array_like=True, tag="loop"):
    """Runs `body` again and again, for as long as `condition` gives true.

    Both take the first `constants` inputs, which stay what they are, and the carried values, which begin as the other
    inputs, and of which the body gives the next.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    constants: int
    condition: Program
    body: Program


class Route(msgspec.Struct, frozen=True, array_like=True, tag="route"):
    """Sends rows to where numbers that devices compute say: a sparse exchange. See `atoll.ir.row_exchange`.

    Takes rows, in `groups` of one size, and sizes: int32 [groups, destinations], by which the rows of each group lie,
    those of one destination after those of another. With a third input they need not lie so: an order, int32
    [groups, places], has the row of the group that stands at each place of that line. One may stand at several.

    Gives for each destination a block and its spans: in each group of the block the rows that are for it come first,
    and the rest is zeros; spans, int32 [groups, 2], has the first place that they had in the line, and their number.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    groups: int


class Unroute(msgspec.Struct, frozen=True, array_like=True, tag="unroute"):
    """Sends rows back to where they came from: takes what a Route has given, and gives rows as it took them.

    Of each group of a block those rows return that are in its spans; what nobody returns is zeros.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec]
    groups: int


Node = Call | HostToDevice | DeviceToHost | Transfer | Rearrange | Report | Switch | Loop | Route | Unroute


class Program(msgspec.Struct, frozen=True, array_like=True):
    """What a client asks for. `results` are the values that the launch hands back, in order."""

    name: str
    arguments: tuple[ArraySpec, ...]
    nodes: tuple[Node, ...]
    results: tuple[int, ...]
    feeds: int = 0


def single(
    name: str,
    arguments: tuple[ArraySpec, ...],
    node: Node,
    *,
    feeds: int = 0,
) -> Program:
    """The program of one node that takes all arguments and returns all its outputs."""
    first = len(arguments)
    return Program(name, arguments, (node,), tuple(range(first, first + output_count(node))), feeds)


# A launch takes one credit of its session's window for so many nodes: the controller keeps 1 KB for each node.
NODES_PER_CREDIT = 128


def credits_of(*programs: Program) -> int:
    """What a launch that may run these takes of its session's window, until it has ended."""
    return 1 + sum(len(each.nodes) for each in programs) // NODES_PER_CREDIT


def output_count(node: Node) -> int:
    """How many values the node defines."""
    completes = isinstance(node, DeviceToHost) or (isinstance(node, Call) and node.completion)
    return len(node.outputs) + completes


def consumes(node: Node) -> tuple[int, ...]:
    """The values whose buffers the node consumes."""
    if isinstance(node, Call):
        return tuple(node.inputs[i] for i in node.donated)
    return node.inputs if getattr(node, "donate", False) else ()


def preserving(node: Node, kept: frozenset[int]) -> Node:
    """The node without consuming these values."""
    if not kept.intersection(consumes(node)):
        return node
    if isinstance(node, Call):
        donated = tuple(i for i in node.donated if node.inputs[i] not in kept)
        preserved = tuple(sorted({*node.preserved, *node.donated} - set(donated)))
        return msgspec.structs.replace(node, donated=donated, preserved=preserved)
    return msgspec.structs.replace(node, donate=False)


def value_specs(program: Program) -> list[ArraySpec | None]:
    """What each value of the program is; None for a completion."""
    specs: list[ArraySpec | None] = list(program.arguments)
    for node in program.nodes:
        specs.extend(specs_of(node))
    return specs


def specs_of(node: Node) -> tuple[ArraySpec | None, ...]:
    """What each value is that the node defines; None for a completion."""
    count = output_count(node)
    return node.outputs if count == len(node.outputs) else (*node.outputs, *([None] * (count - len(node.outputs))))


def check(program: Program) -> None:
    """Raises INVALID_ARGUMENT where a value is used before it is defined, or a feed is out of range."""
    defined = len(program.arguments)
    for node in program.nodes:
        defined = check_node(program.name, node, defined, program.feeds)
    check_results(program, defined)


def check_results(program: Program, defined: int) -> None:
    """Raises INVALID_ARGUMENT where the program returns a value that is none of so many."""
    for value in program.results:
        if not 0 <= value < defined:
            raise invalid(f"program {program.name!r} returns value {value}, of which {defined} are defined")


def check_node(name: str, node: Node, defined: int, feeds: int) -> int:
    """Check a node of a program that has so many values and feeds; return how many values are defined after it.

    Raises INVALID_ARGUMENT.
    """
    for value in node.inputs:
        if not 0 <= value < defined:
            raise invalid(f"program {name!r} uses value {value}, of which {defined} are defined")
    for feed in _feeds(node):
        if not 0 <= feed < feeds:
            raise invalid(f"program {name!r} uses feed {feed} of {feeds}")
    if isinstance(node, Transfer) and len(node.inputs) != len(node.outputs):
        raise invalid(f"program {name!r} transfers {len(node.inputs)} inputs and {len(node.outputs)} outputs")
    if isinstance(node, Call):
        for position in (*node.donated, *node.preserved):
            if not 0 <= position < len(node.inputs):
                raise invalid(f"program {name!r} donates position {position} of {len(node.inputs)}")
    if isinstance(node, Rearrange):
        for mapping in node.mappings:
            if not (0 <= mapping.input < len(node.inputs) and 0 <= mapping.output < len(node.outputs)):
                raise invalid(f"program {name!r} rearranges an input or output that it lacks")
            if not all(0 <= bound <= MAX_SHARDS for each in (mapping.source, mapping.target) for bound in each):
                raise invalid(f"program {name!r} rearranges shards that are not there")
            if mapping.source[2] < 1 or mapping.target[2] < 1:
                raise invalid(f"program {name!r} rearranges shards by a step below 1")
    return defined + output_count(node)


def _feeds(node: Node) -> tuple[int, ...]:
    if isinstance(node, HostToDevice):
        return tuple(buffer.feed for buffer in node.buffers)
    return (node.feed,) if isinstance(node, DeviceToHost) else ()
