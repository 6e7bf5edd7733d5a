"""The compiled functions of a program's jit calls, and the choice of their devices and shardings.

A computation runs on the devices of the first of these that exists: its shardings, the shardings inside it, its first
committed operand, JAX's default device. Eager JAX has the same rule, but raises an error if operands are on other
devices; a program transfers them. Threads compile while tracing continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.client import jax_internals as internals
from atoll.client.background_threads import CompilingThreads
from atoll.programs.values import ShardingLike, Value

internals.leave_out_of_tracebacks(__file__)

_COMPILING_THREADS = 8


class ProgramFunction:
    """A computation that is lowered for its devices and compiled in the background.

    The constructor raises JAX's errors if the computation cannot be lowered.
    """

    def __init__(
        self,
        call: JitCall,
        devices: tuple[Any, ...],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        donated: tuple[int, ...],
        compilers: CompilingThreads,
    ) -> None:
        self.call = call
        self.devices = devices
        self.inputs = inputs
        self.outputs = outputs
        self.donated = donated
        jitted = jax.jit(
            internals.as_function(call.jaxpr, call.name),
            in_shardings=tuple(inputs),
            out_shardings=tuple(outputs),
            donate_argnums=donated,
            keep_unused=True,
            compiler_options=dict(call.compiler_options) or None,
        )
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=_typed(aval, sharding))
            for aval, sharding in zip(call.in_avals, inputs, strict=True)
        ]
        self.lowered = jitted.lower(*arguments)
        self._compiled: Future[Any] = compilers.submit(self.lowered.compile)

    def compiled(self) -> Any:
        """Wait for the compilation; return the `jax.stages.Compiled`."""
        return self._compiled.result()

    @property
    def fingerprint(self) -> bytes:
        return bytes(self.compiled().runtime_executable().fingerprint)

    def input_sharding(self, position: int) -> Any:
        return self.compiled().input_shardings[0][position]

    def output_sharding(self, position: int) -> Any:
        return self.compiled().output_shardings[position]


def _typed(aval: Any, sharding: Any) -> Any:
    """Return the sharding if it is part of the array's type (on meshes with explicit axes), otherwise None."""
    explicit = not aval.sharding.mesh.empty and internals.devices_of(sharding) is not None
    return sharding if explicit else None


@dataclass(frozen=True)
class JitCall:
    """The parameters of a jit call in JAX."""

    jaxpr: Any
    name: str
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    donated: tuple[int, ...]
    compiler_options: tuple[tuple[str, Any], ...]
    mesh: Any

    @classmethod
    def of(cls, params: dict[str, Any]) -> JitCall:
        return cls(
            params["jaxpr"],
            params["name"],
            tuple(params["in_shardings"]),
            tuple(params["out_shardings"]),
            tuple(i for i, donated in enumerate(params["donated_invars"]) if donated),
            tuple(params["compiler_options_kvs"]),
            params["ctx_mesh"],
        )

    @property
    def in_avals(self) -> Sequence[Any]:
        avals: Sequence[Any] = self.jaxpr.in_avals
        return avals

    @property
    def out_avals(self) -> Sequence[Any]:
        avals: Sequence[Any] = self.jaxpr.out_avals
        return avals


@dataclass(frozen=True)
class BoundCall:
    """A call with its function, and the shardings of its operands and results."""

    function: ProgramFunction
    inputs: tuple[ShardingLike, ...]
    outputs: tuple[ShardingLike, ...]
    committed: bool


class SeveralMeshes(Exception):
    """A computation has shardings over different devices, so it cannot be one function."""


class FunctionTable:
    """The functions of one program. Equal calls share a function. `close` lets the compiling threads end."""

    def __init__(self) -> None:
        self.functions: dict[Any, ProgramFunction] = {}
        self._compilers = CompilingThreads(_COMPILING_THREADS, "atoll-compile")

    def close(self) -> None:
        """Stop accepting calls. Compilations in progress continue."""
        self._compilers.close()

    def bind(self, call: JitCall, operands: Sequence[Value]) -> BoundCall:
        """Choose devices and shardings for a call, and start to compile its function unless that has been done.

        Raise SeveralMeshes.
        """
        inside = list(internals.shardings_inside(call.jaxpr))
        named = [s for s in (*call.in_shardings, *call.out_shardings) if internals.devices_of(s) is not None]
        if len({internals.devices_of(each) for each in (*named, *inside)}) > 1:
            raise SeveralMeshes
        first = next((value for value in operands if value.committed and value.has_sharding), None)
        lead = next(iter((*named, *inside)), None)
        devices = internals.devices_of(lead) or internals.mesh_devices(call.mesh)
        if devices is None:
            lead = first.sharding if first is not None else None
            devices = internals.devices_of(lead) or (internals.default_device(),)
        inputs, outputs = list(call.in_shardings), list(call.out_shardings)
        mapped = internals.only_shard_map(call.jaxpr)
        if mapped is not None:
            inputs = [_first(each) for each in zip(inputs, mapped[0], strict=True)]
            outputs = [_first(each) for each in zip(outputs, mapped[1], strict=True)]
        for i, value in enumerate(operands):
            if internals.devices_of(inputs[i]) is None and value.committed and value.has_sharding:
                inputs[i] = _over(value.sharding, devices, lead)
        committed = len(devices) > 1 or bool(named or inside) or first is not None
        function = self.function(call, devices, inputs, outputs, call.donated)
        return BoundCall(
            function,
            tuple(self._resolved(s, devices, function.input_sharding, i) for i, s in enumerate(inputs)),
            tuple(self._resolved(s, devices, function.output_sharding, i) for i, s in enumerate(outputs)),
            committed,
        )

    def function(
        self,
        call: JitCall,
        devices: tuple[Any, ...],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        donated: tuple[int, ...],
    ) -> ProgramFunction:
        """Return the function for a call with these shardings. XLA chooses those that are unspecified."""
        key = (
            id(call.jaxpr),
            call.name,
            devices,
            tuple(inputs),
            tuple(outputs),
            donated,
            call.compiler_options,
            call.mesh,
            internals.trace_context(),
        )
        function = self.functions.get(key)
        if function is None:
            # The function keeps the jaxpr alive, whose identity is in the key.
            function = self.functions[key] = ProgramFunction(call, devices, inputs, outputs, donated, self._compilers)
        return function

    def donating(self, function: ProgramFunction, more: set[int]) -> ProgramFunction:
        """Return the same function with more donated inputs."""
        donated = tuple(sorted({*function.donated, *more}))
        return self.function(function.call, function.devices, function.inputs, function.outputs, donated)

    def _resolved(
        self, sharding: Any, devices: tuple[Any, ...], chosen: Callable[[int], Any], position: int
    ) -> ShardingLike:
        if internals.devices_of(sharding) is not None:
            return sharding
        if len(devices) == 1:
            return SingleDeviceSharding(devices[0])
        return lambda: chosen(position)


def _first(shardings: Sequence[Any]) -> Any:
    """Return the first sharding that has devices, or the last one."""
    return next((each for each in shardings if internals.devices_of(each) is not None), shardings[-1])


def _over(sharding: Any, devices: tuple[Any, ...], lead: Any) -> Any:
    """Return the sharding if it is over `devices`, otherwise the most similar sharding over them."""
    if internals.devices_of(sharding) == devices:
        return sharding
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    if isinstance(sharding, NamedSharding):
        if isinstance(lead, NamedSharding) and lead.mesh.shape == sharding.mesh.shape:
            return NamedSharding(lead.mesh, sharding.spec)
        if sharding.mesh.size == len(devices):
            mesh = Mesh(np.array(devices, object).reshape(sharding.mesh.devices.shape), sharding.mesh.axis_names)
            return NamedSharding(mesh, sharding.spec)
    if isinstance(lead, NamedSharding):
        return NamedSharding(lead.mesh, PartitionSpec())
    return NamedSharding(Mesh(np.array(devices, object), "replicas"), PartitionSpec())


internals.leave_out_of_tracebacks(__file__)


class ReshardingTable:
    """The functions of a program that reshard arrays on the same devices: each returns its argument, as in a jit.

    XLA moves the parts between the devices with collectives. A transfer would move them through the hosts' memory.
    """

    def __init__(self, functions: FunctionTable) -> None:
        self._functions = functions
        self._jaxprs: dict[Any, Any] = {}  # by type; the function table finds functions by the identity of their jaxpr

    def find(self, value: Value, target: Any) -> ProgramFunction | None:
        """Return the function that reshards the array to `target`, or None if that needs a transfer."""
        source = value.sharding
        if not internals.can_compile_resharding(value.aval, source, target):
            return None
        aval = value.aval.update(sharding=None)
        jaxpr = self._jaxprs.get(aval)
        if jaxpr is None:
            with internals.set_current_trace(internals.eager_trace):
                jaxpr = self._jaxprs[aval] = jax.make_jaxpr(lambda x: x)(aval)
        inputs, outputs = ([internals.by_tiles(each, aval.ndim)] for each in (source, target))
        call = JitCall(jaxpr, "reshard", (), (), (), (), None)
        devices = internals.devices_of(source)
        assert devices is not None
        return self._functions.function(call, devices, inputs, outputs, ())
