"""The recording of a traced program: its nodes, with the values that they take and return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atoll.programs.program_functions import FunctionTable, ProgramFunction
from atoll.programs.values import Value


@dataclass(eq=False)
class CallNode:
    """A node that calls a function. `donated` are positions of inputs. If it `reshards`, a transfer can replace it."""

    function: ProgramFunction
    inputs: list[Value]
    outputs: list[Value]
    donated: tuple[int, ...]
    line: str
    has_effects: bool = False
    reshards: bool = False


@dataclass(eq=False)
class TransferNode:
    """A node that copies its input to another sharding."""

    inputs: list[Value]
    outputs: list[Value]
    donated: bool
    line: str


@dataclass(eq=False)
class ControlFlowNode:
    """A switch, or a loop if `constants` is set.

    The first input of a switch chooses a part; the other inputs are for the parts. A loop has two parts, a condition
    and a body, which take its inputs. The first `constants` inputs of a loop do not change.
    """

    inputs: list[Value]
    outputs: list[Value]
    parts: list[Region]
    line: str
    constants: int | None = None
    donated: tuple[int, ...] = ()


@dataclass(eq=False)
class Region:
    """A part of a control flow node. `taken` has the node's inputs by the identities of the part's values."""

    name: str
    nodes: list[RecordedNode]
    taken: dict[int, int]
    results: list[Value]


@dataclass(eq=False)
class RowsNode:
    """A node of a sparse exchange of rows in groups: an unroute if `is_back`, otherwise a route."""

    inputs: list[Value]
    outputs: list[Value]
    groups: int
    is_back: bool
    line: str
    donated: tuple[int, ...] = ()


RecordedNode = CallNode | TransferNode | ControlFlowNode | RowsNode


@dataclass
class Recording:
    """The nodes of a traced function. `results` are its flat results: values, or constant arrays.

    A part of a control flow node may use values of the enclosing function: `captured` has them by the identities of
    their placeholders.
    """

    name: str
    arguments: list[Value]
    functions: FunctionTable
    nodes: list[RecordedNode] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    captured: dict[int, Value] = field(default_factory=dict)
