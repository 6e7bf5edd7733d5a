"""Outlines of IFRT IR programs, which run compiled functions on several meshes (MPMD).

A compiler process reads such a program and answers with its outline. The outline is a program on *logical devices*:
positions in the list of devices that the client chooses when it compiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from atoll.errors import invalid
from atoll.ir.program import Call, Node, Program
from atoll.ir.types import ArraySpec
from atoll.quantities import counted


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """A function of the program, and the mesh that runs it. `devices` are logical."""

    name: str
    mesh: str
    devices: tuple[int, ...]

    @property
    def key(self) -> str:
        """The name under which the client sends compile options for the fragment, and asks for its costs."""
        return f"{self.name}_mesh_{self.mesh}"


class Outline(msgspec.Struct, frozen=True, array_like=True):
    """An IFRT IR program without the contents of its fragments.

    `Call.function` are positions in `fragments`. A run consumes the arguments at the positions `donated`, even if no
    node does.
    """

    program: Program
    fragments: tuple[Fragment, ...]
    donated: tuple[int, ...] = ()

    @property
    def device_count(self) -> int:
        """The number of logical devices up to the last one that the program uses."""
        used = [
            *(device for fragment in self.fragments for device in fragment.devices),
            *(device for spec in self.program.arguments for device in spec.sharding.devices),
            *(device for node in self.program.nodes for spec in node.outputs for device in spec.sharding.devices),
        ]
        return max(used, default=-1) + 1

    def on(self, devices: Sequence[int]) -> Outline:
        """Return the outline with these devices in place of the logical ones. Raise INVALID_ARGUMENT."""
        count = self.device_count
        if count > len(devices):
            raise invalid(f"the program uses {counted(count, 'device')}, but the compile options have {len(devices)}")
        placed = _Placement(devices)
        program = self.program
        return Outline(
            replace(
                program,
                arguments=tuple(map(placed.spec, program.arguments)),
                nodes=tuple(map(placed.node, program.nodes)),
            ),
            tuple(replace(each, devices=placed.devices(each.devices)) for each in self.fragments),
            self.donated,
        )


class _Placement:
    """Replaces logical devices by `devices`. Equal types stay one object."""

    def __init__(self, devices: Sequence[int]) -> None:
        self._devices = devices
        self._specs: dict[ArraySpec, ArraySpec] = {}

    def devices(self, logical: Sequence[int]) -> tuple[int, ...]:
        if min(logical, default=0) < 0:
            raise invalid(f"the program uses the logical device {min(logical)}")
        return tuple(self._devices[each] for each in logical)

    def spec(self, spec: ArraySpec) -> ArraySpec:
        placed = self._specs.get(spec)
        if placed is None:
            sharding = replace(spec.sharding, devices=self.devices(spec.sharding.devices))
            placed = self._specs[spec] = replace(spec, sharding=sharding)
        return placed

    def node(self, node: Node) -> Node:
        placed = replace(node, outputs=tuple(map(self.spec, node.outputs)))
        return replace(placed, devices=self.devices(placed.devices)) if isinstance(placed, Call) else placed
