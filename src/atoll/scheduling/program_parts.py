"""Definitions of programs that are sent in several messages."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from atoll.ir.program import Call, Node, Program
from atoll.ir.types import ArraySpec
from atoll.ir.validation import DefinitionCheck


@dataclass
class ProgramParts:
    """The parts of one definition that have arrived, and their check."""

    name: str
    arguments: tuple[ArraySpec, ...]
    feeds: int
    check: DefinitionCheck
    nodes: list[Node] = field(default_factory=list)
    called: dict[int, None] = field(default_factory=dict)  # functions

    def checked(self, part: Program) -> DefinitionCheck:
        """Return the check after this part. Raises INVALID_ARGUMENT; the parts so far stay as they are."""
        check = copy.copy(self.check)
        for node in part.nodes:
            check.node(node)
        return check

    def add(self, part: Program) -> None:
        """Keep a part that was checked."""
        self.check.count(part.nodes)
        self.nodes += part.nodes
        self.called.update(dict.fromkeys(calls_of(part)))

    def whole(self, last: Program) -> Program:
        """The program that this last part completes."""
        return Program(self.name, self.arguments, (*self.nodes, *last.nodes), last.results, self.feeds)


def calls_of(part: Program) -> list[int]:
    """Return the functions that the nodes of a program, or of a part of it, call."""
    return [node.function for node in part.nodes if isinstance(node, Call)]
