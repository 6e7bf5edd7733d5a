"""What tracing a program records: its nodes, and the values that they make and take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.programs.program_functions import Function, FunctionTable
from atoll.programs.values import Value


@dataclass(eq=False)
class CallNode:
    """A node that calls a function; `donated` are positions among its inputs. If it `reshards`, a transfer would do."""

    function: Function
    inputs: list[Value]
    outputs: list[Value]
    donated: tuple[int, ...]
    line: str
    has_effects: bool = False
    reshards: bool = False


@dataclass(eq=False)
class TransferNode:
    """A node that gives its input another sharding."""

    inputs: list[Value]
    outputs: list[Value]
    donated: bool
    line: str


@dataclass(eq=False)
class ControlFlowNode:
    """A control flow node: a switch, whose first input chooses; or, where `constants` counts the inputs that
    stay, a loop of a condition and a body. The parts take its inputs, a switch's all but the first.
    """

    inputs: list[Value]
    outputs: list[Value]
    parts: list[Region]
    line: str
    constants: int | None = None
    donated: tuple[int, ...] = ()


@dataclass(eq=False)
class Region:
    """What a control flow node may run. `taken` are the inputs that its own values are, by their identity."""

    name: str
    nodes: list[RecordedNode]
    taken: dict[int, int]
    results: list[Value]


@dataclass(eq=False)
class RowsNode:
    """A node of a sparse exchange, of rows in groups; `is_back` where they go back to where they came from."""

    inputs: list[Value]
    outputs: list[Value]
    groups: int
    is_back: bool
    line: str
    donated: tuple[int, ...] = ()


RecordedNode = CallNode | TransferNode | ControlFlowNode | RowsNode


@dataclass
class Recording:
    """All that a traced function does. `results` are its flat results: values, or arrays that no launch changes.

    A part of a control flow node may use values of the function around it: `captured` are these, by the
    identity of what stands for them.
    """

    name: str
    arguments: list[Value]
    functions: FunctionTable
    nodes: list[RecordedNode] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    captured: dict[int, Value] = field(default_factory=dict)
