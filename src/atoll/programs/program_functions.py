"""The devices and shardings of a program's jit calls, and their compiled functions.

A computation runs on the devices of its shardings; else of the shardings inside of it; else of its first committed
operand; else on JAX's default device. That is eager JAX's rule, except that operands on other devices are transferred
and are no error. XLA compiles on threads, while tracing goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from atoll.client import jax_internals as internals
from atoll.programs.values import ShardingLike, Value

internals.leave_out_of_tracebacks(__file__)

_COMPILING_THREADS = 8


class Function:
    """A computation, lowered for its devices and being compiled.

    Raises from the constructor what JAX raises for a computation that cannot be lowered.
    """

    def __init__(
        self,
        call: JitCall,
        devices: tuple[Any, ...],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        donated: tuple[int, ...],
        compilers: ThreadPoolExecutor,
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
        """The `jax.stages.Compiled`; waits for it."""
        return self._compiled.result()

    @property
    def fingerprint(self) -> bytes:
        return bytes(self.compiled().runtime_executable().fingerprint)

    def input_sharding(self, position: int) -> Any:
        return self.compiled().input_shardings[0][position]

    def output_sharding(self, position: int) -> Any:
        return self.compiled().output_shardings[position]


def _typed(aval: Any, sharding: Any) -> Any:
    """The sharding, where it is part of the array's type: on meshes with explicit axes."""
    explicit = not aval.sharding.mesh.empty and internals.devices_of(sharding) is not None
    return sharding if explicit else None


@dataclass(frozen=True)
class JitCall:
    """The parameters that JAX gives a jit call."""

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

    function: Function
    inputs: tuple[ShardingLike, ...]
    outputs: tuple[ShardingLike, ...]
    committed: bool


class SeveralMeshes(Exception):
    """A computation names shardings over different devices: it is not one function."""


class FunctionTable:
    """The functions of one program; equal calls share one. `close` lets its threads end."""

    def __init__(self) -> None:
        self.functions: dict[Any, Function] = {}
        self._compilers = ThreadPoolExecutor(_COMPILING_THREADS, "atoll-compile")

    def close(self) -> None:
        """No more calls come; functions that are being compiled still will be."""
        self._compilers.shutdown(wait=False)

    def bind(self, call: JitCall, operands: Sequence[Value]) -> BoundCall:
        """Chooses devices and shardings for a call, and has its function compiled there unless it is already.

        Raises SeveralMeshes.
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
    ) -> Function:
        """The function for a call whose shardings are resolved as far as JAX knows them."""
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
            # It keeps the jaxpr alive, whose identity is in the key.
            function = self.functions[key] = Function(call, devices, inputs, outputs, donated, self._compilers)
        return function

    def donating(self, function: Function, more: set[int]) -> Function:
        """The same function, but it also donates these inputs."""
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
    """The first that names devices, else the last."""
    return next((each for each in shardings if internals.devices_of(each) is not None), shardings[-1])


def _over(sharding: Any, devices: tuple[Any, ...], lead: Any) -> Any:
    """The sharding if it is over these devices, else the most similar one that is."""
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
