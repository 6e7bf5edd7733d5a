"""The program: a dataflow graph on virtual devices, with one node per sharded computation.

Values are numbered: first the arguments, then the outputs of the nodes in order. A single `jit` call is a program with
one `Call`; a `device_put` to other devices is a program with one `Transfer`. *Feeds* are numbered buffers that the
client's proxy and a worker exchange without going through the controller.
"""

from __future__ import annotations

import msgspec

from atoll.errors import invalid
from atoll.ir.types import ArraySpec, Shape
from atoll.quantities import counted

MAX_SHARDS = 1 << 24  # per array
# The stream of all persistence requests, so that those of a session on a host run one after another: reads follow
# earlier writes, and only one uses host memory at a time. No thread of a client has this stream, so calls of its
# threads continue.
STORAGE_STREAM = -1


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Runs a compiled function, as one gang on all devices of its assignment.

    The call consumes the buffers of `inputs` at the positions `donated`. It copies those at `preserved`, which the
    function would consume and the caller keeps. A function of colocated Python has a `stream`: it runs on the hosts of
    the devices, for any time, after the earlier calls of the same stream.
    """

    function: int
    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    devices: tuple[int, ...]
    donated: tuple[int, ...] = ()
    preserved: tuple[int, ...] = ()
    # The call has one more output, its completion, because the caller requested its status.
    completion: bool = False
    stream: int | None = None


class HostBuffer(msgspec.Struct, frozen=True, array_like=True):
    """Bytes from the client, in `shape` and `strides` in bytes (None for row-major order without gaps).

    The buffer contains each of the shards at `positions` of the output's sharding. If `positions` is None, it contains
    the whole array. `output` is the position of the output in its node.
    """

    feed: int
    shape: Shape
    strides: tuple[int, ...] | None
    positions: tuple[int, ...] | None
    output: int = 0


class HostToDevice(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Makes one array from host buffers, or several arrays from several buffers.

    With several outputs and one buffer, the buffer has their contents one after the other, in row-major order. All
    outputs are on one device each, of the same host. The shape of the buffer is its size in bytes.
    """

    buffers: tuple[HostBuffer, ...]
    outputs: tuple[ArraySpec, ...]

    inputs: tuple[int, ...] = ()


class DeviceToHost(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Sends the contents of an array to the client, in `strides` (None for row-major order without gaps).

    With several inputs, it sends their contents one after the other, without `strides`. All of them must be whole on
    devices of one host. With `positions`, it sends one shard of each input instead: the one at `positions[i]` of the
    sharding of `inputs[i]`. All of these shards must be on one host. The only output is the completion.
    """

    inputs: tuple[int, ...]
    feed: int
    strides: tuple[int, ...] | None
    outputs: tuple[ArraySpec, ...] = ()
    positions: tuple[int, ...] = ()


class Transfer(msgspec.Struct, frozen=True, array_like=True, tag="transfer"):
    """Changes the sharding of each input to that of its output. With `donate`, the inputs are consumed.

    Without `reshard`, shard i becomes shard i, on another device or in another memory.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    donate: bool = False
    reshard: bool = False


class Mapping(msgspec.Struct, frozen=True, array_like=True):
    """Shards `source[0]:source[1]:source[2]` of input `input` become shards `target` of output `output`."""

    input: int
    output: int
    source: tuple[int, int, int]
    target: tuple[int, int, int]


class Rearrange(msgspec.Struct, frozen=True, array_like=True, tag="rearrange"):
    """Makes arrays from the shards of other arrays, without moving or copying them.

    Disassembling, assembling, remapping and selecting a shard are rearrangements. With `bitcast`, the bytes of the
    shards are interpreted as the dtype and shape of the outputs.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    mappings: tuple[Mapping, ...]
    donate: bool = False
    bitcast: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Reports its input, one integer or boolean, to the controller. See `atoll.ir.control_flow_split`."""

    inputs: tuple[int]
    outputs: tuple[ArraySpec, ...] = ()


class Switch(msgspec.Struct, frozen=True, array_like=True, tag="switch"):
    """Runs the branch with the index of the first input on the other inputs. The index is clamped to the branches.

    Only programs that clients submit have `Switch` and `Loop` nodes: `atoll.ir.control_flow_split` splits them into
    launches.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    branches: tuple[Program, ...]


class Loop(msgspec.Struct, frozen=True, array_like=True, tag="loop"):
    """Runs `body` repeatedly while `condition` returns true.

    Both take the first `constants` inputs, which do not change, and the carried values. These start as the other
    inputs, and the body returns their next values.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    constants: int
    condition: Program
    body: Program


class Route(msgspec.Struct, frozen=True, array_like=True, tag="route"):
    """Sends rows to destinations that devices compute: a sparse exchange. See `atoll.ir.row_exchange`.

    The inputs are rows, in `groups` of equal size, and their sizes, int32 [groups, destinations]. The rows of a group
    are sorted by destination, and the sizes are their numbers per destination. If the rows are not sorted, a third
    input contains their order, int32 [groups, places]: the row of the group at each place of the sorted sequence. A row
    may be at several places.

    The outputs are a block and its spans per destination. Each group of a block starts with the rows for the
    destination, followed by zeros. Spans, int32 [groups, 2], contain their first place in the sequence, and their
    number.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec, ...]
    groups: int


class Unroute(msgspec.Struct, frozen=True, array_like=True, tag="unroute"):
    """Sends rows back to their origin: the inverse of a `Route`, with its outputs as inputs.

    The rows of each block that its spans contain return. Rows that no block returns are zeros.
    """

    inputs: tuple[int, ...]
    outputs: tuple[ArraySpec]
    groups: int


Node = Call | HostToDevice | DeviceToHost | Transfer | Rearrange | Report | Switch | Loop | Route | Unroute


class Program(msgspec.Struct, frozen=True, array_like=True):
    """A client's program. A launch returns the values `results`, in order."""

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
    """Return a program with one node that takes all arguments, and all of whose outputs are results."""
    first = len(arguments)
    return Program(name, arguments, (node,), tuple(range(first, first + output_count(node))), feeds)


# A launch takes one credit per this number of nodes, because the controller stores 1 KB per node.
NODES_PER_CREDIT = 128


def credits_of(*programs: Program) -> int:
    """Return the credits of its session's window that a launch takes until it has ended, if it may run `programs`."""
    return 1 + sum(len(each.nodes) for each in programs) // NODES_PER_CREDIT


def output_count(node: Node) -> int:
    """Return how many values the node defines."""
    completes = isinstance(node, DeviceToHost) or (isinstance(node, Call) and node.completion)
    return len(node.outputs) + completes


def consumes(node: Node) -> tuple[int, ...]:
    """Return the values whose buffers the node consumes."""
    if isinstance(node, Call):
        return tuple(node.inputs[i] for i in node.donated)
    return node.inputs if getattr(node, "donate", False) else ()


def preserving(node: Node, kept: frozenset[int]) -> Node:
    """Return the node changed so that it does not consume the values `kept`."""
    if not kept.intersection(consumes(node)):
        return node
    if isinstance(node, Call):
        donated = tuple(i for i in node.donated if node.inputs[i] not in kept)
        preserved = tuple(sorted({*node.preserved, *node.donated} - set(donated)))
        return msgspec.structs.replace(node, donated=donated, preserved=preserved)
    return msgspec.structs.replace(node, donate=False)


def value_specs(program: Program) -> list[ArraySpec | None]:
    """Return the type of each value of the program; None for a completion."""
    specs: list[ArraySpec | None] = list(program.arguments)
    for node in program.nodes:
        specs.extend(specs_of(node))
    return specs


def specs_of(node: Node) -> tuple[ArraySpec | None, ...]:
    """Return the type of each value that the node defines; None for a completion."""
    count = output_count(node)
    return node.outputs if count == len(node.outputs) else (*node.outputs, *([None] * (count - len(node.outputs))))


def check(program: Program) -> None:
    """Raise INVALID_ARGUMENT if the program uses a value before its definition, or a feed that it does not have."""
    defined = len(program.arguments)
    for node in program.nodes:
        defined = check_node(program.name, node, defined, program.feeds)
    check_results(program, defined)


def check_results(program: Program, defined: int) -> None:
    """Raise INVALID_ARGUMENT if a result is not one of the program's `defined` values."""
    for value in program.results:
        if not 0 <= value < defined:
            raise invalid(f"program {program.name!r} returns value {value} of {defined} values")


def check_node(name: str, node: Node, defined: int, feeds: int) -> int:
    """Check a node of a program with `feeds` feeds that has `defined` values before the node.

    Returns the number of values after the node. Raises INVALID_ARGUMENT.
    """
    for value in node.inputs:
        if not 0 <= value < defined:
            raise invalid(f"program {name!r} uses value {value} of {defined} values")
    for feed in _feeds(node):
        if not 0 <= feed < feeds:
            raise invalid(f"program {name!r} uses feed {feed} of {feeds}")
    if isinstance(node, HostToDevice):
        for buffer in node.buffers:
            if not 0 <= buffer.output < len(node.outputs):
                raise invalid(f"program {name!r} makes output {buffer.output} of {len(node.outputs)} of a host buffer")
    if isinstance(node, Transfer) and len(node.inputs) != len(node.outputs):
        raise invalid(
            f"program {name!r} transfers {counted(len(node.inputs), 'input')} to {counted(len(node.outputs), 'output')}"
        )
    if isinstance(node, Call):
        for position in (*node.donated, *node.preserved):
            if not 0 <= position < len(node.inputs):
                inputs = counted(len(node.inputs), "input")
                raise invalid(f"program {name!r} donates input {position} of a call with {inputs}")
    if isinstance(node, Rearrange):
        for mapping in node.mappings:
            if not (0 <= mapping.input < len(node.inputs) and 0 <= mapping.output < len(node.outputs)):
                raise invalid(f"program {name!r} rearranges an input or output that does not exist")
            if not all(0 <= bound <= MAX_SHARDS for each in (mapping.source, mapping.target) for bound in each):
                raise invalid(f"program {name!r} rearranges shards that do not exist")
            if mapping.source[2] < 1 or mapping.target[2] < 1:
                raise invalid(f"program {name!r} rearranges shards with a step below 1")
    return defined + output_count(node)


def _feeds(node: Node) -> tuple[int, ...]:
    if isinstance(node, HostToDevice):
        return tuple(buffer.feed for buffer in node.buffers)
    return (node.feed,) if isinstance(node, DeviceToHost) else ()
