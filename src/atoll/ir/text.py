"""Text forms of programs: that of `f.lower(*args).as_text()`, and that of the gangs and plans after lowering."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, groupby

from msgspec.structs import replace

from atoll.cluster.locations import Placement
from atoll.ir import plan as p
from atoll.ir.control_flow_split import LoopPrograms, SwitchPrograms, has_control_flow, parts_of, split
from atoll.ir.exchange import ReceivePiece, runs
from atoll.ir.lowering import lower
from atoll.ir.plan import LoweredGang
from atoll.ir.program import (
    Call,
    DeviceToHost,
    HostBuffer,
    HostToDevice,
    Loop,
    Node,
    Program,
    Rearrange,
    Report,
    Route,
    Switch,
    Transfer,
    Unroute,
    check,
    output_count,
)
from atoll.ir.program import (
    Mapping as ShardMapping,
)
from atoll.ir.types import ArraySpec, Box, Even, Replicated, Shape, Tiled, Tiling, Uneven


def render(program: Program, functions: Sequence[str]) -> str:
    """Return the program as text in the style of MLIR, on virtual devices and before all passes.

    `functions[i]` is the name of function i. Names that repeat get a number. The text is short for any number of
    shards: it contains ranges in lists of numbers (`[0:2048]`, `[0:16:2]`), repeated shapes once with their number, and
    no order of tiles if it is 0, 1, 2, ...
    """
    check(program)
    symbols = _symbols(functions)
    return _each_launch(program, lambda each: _program(each, symbols))


def render_lowered(program: Program, placement: Placement, functions: Sequence[str]) -> str:
    """Return the program's gangs and plans as text that cannot be parsed. Hosts with equal plans are combined.

    Raises the errors of `lower`.
    """
    symbols = _symbols(functions)
    return _each_launch(program, lambda each: _lowered(each, placement, symbols))


def _each_launch(program: Program, text_of: Callable[[Program], str]) -> str:
    """Return the text of a program, or of each of its launches if it has control flow nodes."""
    if not has_control_flow(program):
        return text_of(program)
    texts = []
    for piece in split(program):
        programs, runs = piece.programs, "once"
        if isinstance(programs, SwitchPrograms):
            runs = f"the first, which reports an index, and then one of the {len(programs.branches)} others"
        elif isinstance(programs, LoopPrograms):
            runs = "the first; then, while the last report is not 0, once the second and repeatedly the third; the last"
        texts.append(f"// ({_values(piece.results)}) = run ({_values(piece.arguments)}): {runs}\n")
        texts.extend(map(text_of, parts_of(programs)))
    return "".join(texts)


def _lowered(program: Program, placement: Placement, symbols: Mapping[int, str]) -> str:
    lowered = lower(program, placement, symbols)
    results = ", ".join(f"%{value}" for value in lowered.results)
    lines = [
        f"program @{program.name}: {len(program.arguments)} arguments, returns ({results}), {program.feeds} feeds",
        *(_gang(number, gang) for number, gang in enumerate(lowered.gangs)),
    ]
    alike: dict[p.Plan, list[int]] = {}
    for host, plan in lowered.plans.items():
        alike.setdefault(plan, []).append(host)
    for plan, hosts in alike.items():
        lines.append(f"plan of hosts {_ranges(hosts)}: takes ({_values(plan.arguments)})")
        for segment in plan.segments:
            notes = "".join(
                f", {word} ({_values(values)})"
                for word, values in (("returns", segment.results), ("drops", segment.drops))
                if values
            )
            lines.append(f"  gang {segment.gang}{notes}")
            lines.extend(f"    {_step(step)}" for step in segment.steps)
    return "\n".join(lines) + "\n"


def _symbols(functions: Sequence[str]) -> dict[int, str]:
    names: dict[int, str] = {}
    taken: set[str] = set()
    for number, name in enumerate(functions):
        candidates: Iterator[str] = (f"{name}_{i}" if i else name for i in count())
        names[number] = next(each for each in candidates if each not in taken)
        taken.add(names[number])
    return names


def _gang(number: int, gang: LoweredGang) -> str:
    text = f"gang {number}: node {gang.node} on island {gang.island}, hosts {_ranges(gang.hosts)}"
    if gang.function:
        how = " together" if gang.collective else " on the hosts' CPUs" if gang.colocated else ""
        text += f", runs @{gang.function}{how}"
    if gang.makes:
        text += f", makes ({_values(gang.makes)})"
    return text + (f", drops ({_values(gang.drops)})" if gang.drops else "")


def _values(values: Iterable[int]) -> str:
    return ", ".join(f"%{value}" for value in values)


def _step(step: p.Step) -> str:
    match step:
        case p.Execute():
            donated = f", donates {_ranges(step.donated)}" if step.donated else ""
            return f"execute @{step.function}({_values(step.inputs)}), outputs from %{step.first_output} on{donated}"
        case p.Python():
            given = _values(value for _, value, _ in step.results)
            return f"{given} = python @{step.function}({_values(v for _, v in step.arguments)}) stream {step.stream}"
        case p.Put():
            return f"%{step.output} = put on {_on(step.array)}, feeds {_feeds(step.pieces)}"
        case p.PutAll():
            return f"{_values(step.outputs)} = put on {', '.join(map(_on, step.arrays))}, feed {step.feed}"
        case p.Get():
            return f"%{step.completion} = get %{step.input} shards {_ranges(step.shards)}, feed {step.feed}"
        case p.GetAll():
            return f"%{step.completion} = get {_values(step.inputs)} shards {_ranges(step.shards)}, feed {step.feed}"
        case p.Report():
            return f"report %{step.input}"
        case p.Move():
            targets = ", ".join(_on(array) for array in step.arrays)
            return f"{_values(step.outputs)} = move {_values(step.inputs)} to {targets}"
        case p.Send():
            pieces = ", ".join(
                f"{piece.shard} {_box(piece.box)} to host {piece.host} as host feed {piece.feed}"
                for piece in step.pieces
            )
            return f"send of %{step.input} shards {pieces}"
        case p.Receive():
            return f"%{step.output} = receive on {_on(step.array)}, host feeds {_feeds(step.pieces)}"
        case p.SendRows():
            sent = ", ".join(f"to host {to} as host feed {feed}" for _, to, feed in step.messages)
            rows, *numbers = step.inputs
            return f"send rows of %{rows} by {_values(numbers)} {sent}"
        case p.ReceiveRows():
            outputs = [step.output] if step.spans < 0 else [step.output, step.spans]
            return f"{_values(outputs)} = receive rows on {_on(step.array)}, host feeds {_ranges(step.feeds)}"
        case p.Select():
            takes = ", ".join(f"%{step.inputs[take.input]} shard {take.shard}" for take in step.takes)
            return f"%{step.output} = select {takes} on {_on(step.array)}"


def _on(array: p.LocalArray) -> str:
    memory = f" {array.memory_kind}" if array.memory_kind else ""
    return f"devices {_ranges(array.devices)}{memory}"


def _feeds(pieces: Iterable[p.HostPiece] | Iterable[ReceivePiece]) -> str:
    return _ranges(list(dict.fromkeys(piece.feed for piece in pieces)))


# ---- programs on virtual devices


def _program(program: Program, symbols: Mapping[int, str]) -> str:
    arguments = ", ".join(f"%{i}: {_type(spec)}" for i, spec in enumerate(program.arguments))
    feeds = f" feeds {program.feeds}" if program.feeds else ""
    lines = ["builtin.module {", f"  atoll.program {_symbol(program.name)}({arguments}){feeds} {{"]
    defined = len(program.arguments)
    for node in program.nodes:
        count = output_count(node)
        outputs = f"{_values(range(defined, defined + count))} = " if count else ""
        types = [_type(spec) for spec in node.outputs] + ["!atoll.completion"] * (count - len(node.outputs))
        lines.append(f"    {outputs}atoll.{_node(node, symbols)}" + (f" : {', '.join(types)}" if types else ""))
        defined += count
    lines += [f"    atoll.return ({_values(program.results)})", "  }", "}", ""]
    return "\n".join(lines)


def _node(node: Node, symbols: Mapping[int, str]) -> str:
    inputs = _values(node.inputs)
    match node:
        case Call():
            name = symbols.get(node.function, f"function_{node.function}")
            text = f"call {_symbol(name)}({inputs}) on {_ranges(node.devices)}"
            for word, positions in (("donate", node.donated), ("preserve", node.preserved)):
                text += f" {word} {_ranges(positions)}" if positions else ""
            return text + (f" stream {node.stream}" if node.stream is not None else "")
        case HostToDevice():
            groups = groupby(node.buffers, lambda buffer: buffer.output)
            return f"put {', '.join(_host_buffers([replace(each, output=0) for each in own]) for _, own in groups)}"
        case DeviceToHost():
            shards = f" shards {_ranges(node.positions)}" if node.positions else ""
            return f"get {inputs}{shards} feed {node.feed}{_strides(node.strides)}"
        case Report():
            return f"report {inputs}"
        case Transfer():
            return f"transfer {inputs}{_flags(donate=node.donate, reshard=node.reshard)}"
        case Rearrange():
            mappings = ", ".join(map(_mapping, node.mappings))
            return f"rearrange {inputs} [{mappings}]{_flags(donate=node.donate, bitcast=node.bitcast)}"
        case Route():
            return f"route {inputs} groups {node.groups}"
        case Unroute():
            return f"unroute {inputs} groups {node.groups}"
        case Switch() | Loop():
            raise AssertionError("control flow nodes are split into launches before printing")


def _flags(**flags: bool) -> str:
    return "".join(f" {name}" for name, is_set in flags.items() if is_set)


def _symbol(name: str) -> str:
    return f"@{name}" if re.fullmatch(r"[A-Za-z_][\w$.]*", name, re.ASCII) else f"@{json.dumps(name)}"


def _strides(strides: tuple[int, ...] | None) -> str:
    return "" if strides is None else f" strides {_list(strides)}"


def _mapping(mapping: ShardMapping) -> str:
    def shards(array: int, bounds: tuple[int, int, int]) -> str:
        start, stop, step = bounds
        return f"{array} at {start}:{stop}" + (f":{step}" if step != 1 else "")

    return f"{shards(mapping.input, mapping.source)} -> {shards(mapping.output, mapping.target)}"


def _host_buffers(buffers: Sequence[HostBuffer]) -> str:
    """Return, for example, `[feed 0 [4, 4] strides [16, 4]]` or `[feeds 0:2 [2] -> [0:2]]`.

    A `feed` fills all of the given positions, or without positions the whole array. Each of several `feeds` fills one
    position.
    """
    texts = []
    at = 0
    while at < len(buffers):
        first, end = buffers[at], at + 1
        if first.positions is not None and len(first.positions) == 1:
            while end < len(buffers) and buffers[end] == HostBuffer(
                first.feed + end - at, first.shape, first.strides, (first.positions[0] + end - at,)
            ):
                end += 1
        text = f"{'feed' if end == at + 1 else 'feeds'} {_range(first.feed, end - at)}"
        text += f" {_list(first.shape)}{_strides(first.strides)}"
        if first.positions is not None:
            here = first.positions if end == at + 1 else range(first.positions[0], first.positions[0] + end - at)
            text += f" -> {_ranges(here)}"
        texts.append(text)
        at = end
    return f"[{', '.join(texts)}]"


def _type(spec: ArraySpec) -> str:
    """Return, for example, `!atoll.array<float32[8, 128], devices = [0:8], tiled = [8, 1], layout = [1, 0]>`.

    The text omits the tiling of a replicated array, and the default memory kind and layout.
    """
    sharding = spec.sharding
    text = f"{spec.dtype}{_list(spec.shape)}, devices = {_ranges(sharding.devices)}{_tiling(sharding.tiling)}"
    if sharding.memory_kind:
        text += f", memory = {json.dumps(sharding.memory_kind)}"
    if spec.layout is not None:
        text += f", layout = {_list(spec.layout)}"
    return f"!atoll.array<{text}>"


def _tiling(tiling: Tiling) -> str:
    match tiling:
        case Replicated():
            return ""
        case Tiled(dims=dims, order=order):
            iota = order == tuple(range(len(order)))
            return f", tiled = {_list(dims)}" + ("" if iota else f" order {_ranges(order)}")
        case Even(shard_shape=shape):
            return f", even = {_list(shape)}"
        case Uneven(shard_shapes=shapes):
            return f", uneven = [{', '.join(_times(shape, len([*same])) for shape, same in groupby(shapes))}]"
    return ", opaque"


def _times(shape: Shape, count: int) -> str:
    return f"{_list(shape)} x {count}" if count > 1 else _list(shape)


# ---- numbers


def _list(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _range(first: int, count: int, step: int = 1) -> str:
    if count == 1:
        return str(first)
    return f"{first}:{first + count * step}" + (f":{step}" if step != 1 else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Return, for example, `[0:8]` or `[0:4, 9]`."""
    return f"[{', '.join(_range(*run) for run in runs(numbers))}]"


def _box(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
