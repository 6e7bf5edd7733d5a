"""Text forms of programs: that of `f.lower(*args).as_text()`, and that of the gangs and plans after lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count

from atoll.cluster.locations import Placement
from atoll.ir import plan as p
from atoll.ir.build_module import build
from atoll.ir.control_flow_split import LoopPrograms, SwitchPrograms, has_control_flow, parts_of, split
from atoll.ir.dialect.syntax import box_text, ranges_text
from atoll.ir.exchange import ReceivePiece
from atoll.ir.lowering import lower
from atoll.ir.plan import LoweredGang
from atoll.ir.program import Program, check


def render(program: Program, functions: Sequence[str]) -> str:
    """Return the program in the dialect, on virtual devices and before all passes.

    `functions[i]` is the name of function i. Names that repeat get a number.
    """
    check(program)
    symbols = _symbols(functions)
    return _each_launch(program, lambda each: str(build(each, symbols)) + "\n")


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
        lines.append(f"plan of hosts {ranges_text(hosts)}: takes ({_values(plan.arguments)})")
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
    text = f"gang {number}: node {gang.node} on island {gang.island}, hosts {ranges_text(gang.hosts)}"
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
            donated = f", donates {ranges_text(step.donated)}" if step.donated else ""
            return f"execute @{step.function}({_values(step.inputs)}), outputs from %{step.first_output} on{donated}"
        case p.Python():
            given = _values(value for _, value, _ in step.results)
            return f"{given} = python @{step.function}({_values(v for _, v in step.arguments)}) stream {step.stream}"
        case p.Put():
            return f"%{step.output} = put on {_on(step.array)}, feeds {_feeds(step.pieces)}"
        case p.Get():
            return f"%{step.completion} = get %{step.input} shards {ranges_text(step.shards)}, feed {step.feed}"
        case p.Report():
            return f"report %{step.input}"
        case p.Move():
            targets = ", ".join(_on(array) for array in step.arrays)
            return f"{_values(step.outputs)} = move {_values(step.inputs)} to {targets}"
        case p.Send():
            pieces = ", ".join(
                f"{piece.shard} {box_text(piece.box)} to host {piece.host} as host feed {piece.feed}"
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
            return f"{_values(outputs)} = receive rows on {_on(step.array)}, host feeds {ranges_text(step.feeds)}"
        case p.Select():
            takes = ", ".join(f"%{step.inputs[take.input]} shard {take.shard}" for take in step.takes)
            return f"%{step.output} = select {takes} on {_on(step.array)}"


def _on(array: p.LocalArray) -> str:
    memory = f" {array.memory_kind}" if array.memory_kind else ""
    return f"devices {ranges_text(array.devices)}{memory}"


def _feeds(pieces: Iterable[p.HostPiece] | Iterable[ReceivePiece]) -> str:
    return ranges_text(list(dict.fromkeys(piece.feed for piece in pieces)))
