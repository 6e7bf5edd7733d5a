"""Lowered and compiled programs, like those of `jax.stages` for jit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from atoll.client import jax_internals as internals
from atoll.cluster.locations import DeviceLocation
from atoll.errors import ProgramError
from atoll.programs.launch import ProgramLaunch
from atoll.programs.program_building import Built, devices, on_atoll
from atoll.programs.values import Value

internals.leave_out_of_tracebacks(__file__)

_NO_CLUSTER = (
    "only a cluster lowers and compiles programs, but this program is on another backend, which runs its function: "
    "start the script with JAX_PLATFORMS=atoll, or call atoll.connect()"
)


class _Stage:
    def __init__(self, built: Built, in_tree: Any, out_tree: Any, donated: frozenset[int]) -> None:
        self._built = built
        self._donated = donated
        self.in_tree = in_tree
        self.out_tree = out_tree

    @property
    def in_avals(self) -> Any:
        """The arguments' types, as a tree of (args, kwargs)."""
        return self.in_tree.unflatten([value.aval for value in self._built.given])

    @property
    def args_info(self) -> Any:
        """A `jax.stages.ArgInfo` per argument, as a tree of (args, kwargs)."""
        return self.in_tree.unflatten(
            [jax.stages.ArgInfo(value.aval, i in self._donated) for i, value in enumerate(self._built.given)]
        )

    @property
    def out_info(self) -> Any:
        """The results' types, as a tree of `jax.ShapeDtypeStruct`."""
        return self.out_tree.unflatten([_structure(each) for each in self._built.described()])

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The flat arguments that may be consumed."""
        return tuple(sorted(self._donated))

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimates, summed over the calls of the program."""
        sums: dict[str, float] = {}
        costs = [function.compiled().cost_analysis() or {} for function in self._built.functions]
        for node in self._built.program.nodes:
            number = getattr(node, "function", None)
            for name, cost in costs[number].items() if number is not None else ():
                sums[name] = sums.get(name, 0.0) + cost
        return sums


class Lowered(_Stage):
    """A traced program. Its functions are lowered, and are being compiled in the background."""

    def as_text(self, stage: str | None = None) -> str:
        """Return the location-free program, or the plan of each host with `stage="lowered"`."""
        from atoll.ir.text import render, render_lowered

        names = [function.call.name for function in self._built.functions]
        if stage is None:
            return render(self._built.program, names)
        if stage != "lowered":
            raise ValueError(f"a program has no stage {stage!r}: omit it, or pass 'lowered'")
        if not on_atoll(self._built):
            raise ProgramError(_NO_CLUSTER)
        locations = {d.id: DeviceLocation(d.slice_index, d.host, d.id) for d in devices(self._built)}
        return render_lowered(self._built.program, locations, names)

    def compile(self) -> Compiled:
        """Wait until all functions are compiled, and register the program with the cluster. Raise ProgramError."""
        if not on_atoll(self._built):
            raise ProgramError(_NO_CLUSTER)
        return Compiled(self._built, self.in_tree, self.out_tree, self._donated)


class Compiled(_Stage):
    """A compiled program, which can be called with arguments of the types for which it was traced."""

    def __init__(self, built: Built, in_tree: Any, out_tree: Any, donated: frozenset[int]) -> None:
        super().__init__(built, in_tree, out_tree, donated)
        self._launch = ProgramLaunch(built) if built.program.nodes else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not internals.trace_state_clean():
            raise ProgramError("a compiled program cannot be transformed: transform the atoll.program itself")
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.in_tree:
            raise ProgramError(f"this program was compiled for arguments {self.in_tree}, but called with {tree}")
        for leaf, value in zip(leaves, self._built.given, strict=True):
            aval = internals.abstractify(leaf)
            if (aval.shape, aval.dtype) != (value.aval.shape, value.aval.dtype):
                raise ProgramError(
                    f"this program was compiled for {value.aval} as {value.line}, but called with {aval}"
                )
        leaves = [_with_sharding(leaf, value) for leaf, value in zip(leaves, self._built.given, strict=True)]
        made: Sequence[Any] = self._launch.call(leaves) if self._launch is not None else ()
        return self.out_tree.unflatten(self._built.returned(made, leaves))

    def as_text(self) -> str:
        """Return XLA's text of each function that the program calls."""
        return "\n\n".join(function.compiled().as_text() for function in self._built.functions)

    @property
    def input_shardings(self) -> Any:
        """The shardings as a tree of (args, kwargs), with None for unused arguments."""
        shardings = [value.sharding if value.has_sharding else None for value in self._built.given]
        return self.in_tree.unflatten(shardings)

    @property
    def output_shardings(self) -> Any:
        return self.out_tree.unflatten([each.sharding for each in self._built.described()])


def _with_sharding(leaf: Any, value: Value) -> Any:
    """Return the leaf with the sharding that the program takes."""
    sharding = getattr(leaf, "sharding", None)
    if value.host or not value.has_sharding:
        return leaf
    return leaf if sharding == value.sharding else jax.device_put(leaf, value.sharding)


def _structure(result: Any) -> Any:
    sharding = result.sharding if not isinstance(result, Value) or result.has_sharding else None
    return jax.ShapeDtypeStruct(result.aval.shape, result.aval.dtype, sharding=sharding)
