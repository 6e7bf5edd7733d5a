"""`function`: a `tf.function` that runs on a mesh, with its variables as arrays on the mesh.

A call runs one compiled function that computes results and new values of variables from the arguments and the old
values. This includes all assignments in the function, such as a whole training step. The shapes, dtypes and Python
values of the arguments select the compiled function, by the rules of `tf.function`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.tensorflow import stablehlo
from atoll.tensorflow.tensorflow_lowering import Lowered, bind, lower
from atoll.tensorflow.tensorflow_shardings import Rule, batch_sharding
from atoll.tensorflow.variables import Variables


@dataclass(frozen=True)
class _Constant:
    """An argument other than a tensor: a Python value, a tf.Variable, or an object such as a model, by identity."""

    kind: type
    value: Any

    @classmethod
    def of(cls, leaf: Any) -> _Constant:
        try:
            value = leaf.ref() if isinstance(leaf, tf.Variable) else leaf
            hash(value)
        except TypeError:
            raise TypeError(f"an argument must be a tensor or hashable, got {leaf!r}") from None
        return cls(type(leaf), value)

    def get(self) -> Any:
        return self.value.deref() if issubclass(self.kind, tf.Variable) else self.value


@dataclass(frozen=True, eq=False)
class Functional:
    """A function without state for arguments of given shapes, for use in `atoll.program`, `jax.jit` and similar::

        state = dict(step.variables)
        results, state = functional(state, x, y)

    `state` is a dict of all variables' values by name; the call returns a new one. `arguments` are only the arrays, in
    the order of `jax.tree.leaves((args, kwargs))`. Settable variables, such as a learning rate, are also read from
    `state`, not from the tf.Variable.

    Attributes:
      assigned: Names of the variables that the function assigns. A call donates their values, unless the function was
        made with `donate=False`.
      kept: Names of the variables that the function only reads.
      shardings: The shardings of the arguments.
    """

    assigned: tuple[str, ...]
    kept: tuple[str, ...]
    shardings: tuple[NamedSharding, ...]
    lowered: Lowered
    jitted: Any

    def __call__(self, state: Mapping[str, Any], *arguments: Any) -> tuple[Any, dict[str, Any]]:
        results, values = self.run(state, arguments)
        return self.lowered.structure(results), {**state, **dict(zip(self.assigned, values, strict=True))}

    def run(self, state: Mapping[str, Any], arguments: Any) -> tuple[list[Any], list[Any]]:
        own, kept = [state[name] for name in self.assigned], [state[name] for name in self.kept]
        with jax.enable_x64(True):
            results: tuple[list[Any], list[Any]] = self.jitted(own, kept, list(arguments))
        return results

    def as_text(self) -> str:
        """Return the function's StableHLO as text."""
        return stablehlo.text(self.lowered.module)


class Function:
    """A TensorFlow function on a mesh, made by `function`. Calls are asynchronous and return a `jax.Array` per tensor.

    The results have TensorFlow's dtypes. A call raises the function's own exceptions during tracing. It raises
    `tf.errors.OpError`, with the op and the user's line, if XLA cannot compile an op, and `jax.errors.JaxRuntimeError`
    if devices fail. After such a failure, call `variables.load()` to restart from the values of the tf.Variables.
    """

    def __init__(self, call: Callable[..., Any], variables: Variables, batch: Any, donate: bool) -> None:
        self._call = call if isinstance(call, tf.types.experimental.PolymorphicFunction) else tf.function(call)
        self.__name__ = str(getattr(call, "__name__", None) or getattr(call, "name", None) or type(call).__name__)
        self.variables = variables
        self.batch = batch
        self.donate = donate
        self._lowered: dict[Any, Lowered] = {}  # by signature; shared by all replicas (see `on`)
        self._traced: dict[Any, Functional] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        functional, arrays = self._prepare(args, kwargs)
        with jax.enable_x64(True):
            placed = jax.device_put(arrays, list(functional.shardings))
        variables = self.variables
        with variables.lock:
            variables.take_settings(functional.kept)
            results, values = functional.run(variables, placed)
            variables.update(dict(zip(functional.assigned, values, strict=True)))
        return functional.lowered.structure(results)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind the function to an object if it is used as a method."""
        return self if instance is None else partial(self, instance)

    def on(self, variables: Variables) -> Function:
        """Return this function for another replica of its variables, on that replica's mesh. Traces are shared."""
        other = Function(self._call, variables, self.batch, self.donate)
        other.__name__ = self.__name__
        other._lowered = self._lowered
        return other

    def functional(self, *args: Any, **kwargs: Any) -> Functional:
        """Return the function without state for arguments like these. A `tf.TensorSpec` can replace a tensor."""
        return self._prepare(args, kwargs)[0]

    def write_back(self) -> None:
        """Call `variables.write_back()`."""
        self.variables.write_back()

    def _prepare(self, args: Any, kwargs: Any) -> tuple[Functional, list[Any]]:
        if tf.inside_function():
            raise tf.errors.FailedPreconditionError(
                None, None, f"{self.__name__} runs on a JAX mesh: call it eagerly, not inside a tf.function"
            )
        leaves, structure = jax.tree.flatten((args, kwargs))
        signature = tuple(_spec(each) if _is_tensor(each) else _Constant.of(each) for each in leaves)
        with self.variables.lock:
            found = self._traced.get((structure, signature))
            if found is None:
                found = self._trace(structure, signature, (args, kwargs))
                self._traced[structure, signature] = found
        return found, [_array(each) for each in leaves if _is_tensor(each)]

    def _trace(self, structure: Any, signature: tuple[Any, ...], arguments: Any) -> Functional:
        specs = [each for each in signature if isinstance(each, tf.TensorSpec)]

        def call(*tensors: tf.Tensor) -> Any:
            values = iter(tensors)
            leaves = [each.get() if isinstance(each, _Constant) else next(values) for each in signature]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return self._call(*args, **kwargs)

        lowered = self._lowered.get((structure, signature))
        if lowered is None:
            lowered = self._lowered[structure, signature] = lower(call, self.__name__, specs)
        assigned_sources = [lowered.captures[place] for place in lowered.written]
        names = self.variables.place(lowered.captures, assigned_sources)
        assigned = tuple(names[place] for place in lowered.written)
        mesh, arrays = self.variables.mesh, self.variables
        shardings = [
            batch_sharding(each, tuple(spec.shape), mesh)
            for each, spec in zip(self._batch_specs(arguments, signature), specs, strict=True)
        ]
        kept = tuple(name for name in names if name not in assigned)
        own = [arrays[name].sharding for name in assigned]
        whole = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(
            _named(partial(_run, lowered, names, assigned), self.__name__),
            in_shardings=(own, [arrays[name].sharding for name in kept], shardings),
            out_shardings=([whole if not aval.shape else None for aval in lowered.avals], own),
            donate_argnums=(0,) if self.donate else (),
        )
        return Functional(assigned, kept, tuple(shardings), lowered, jitted)

    def _batch_specs(self, arguments: Any, signature: tuple[Any, ...]) -> list[PartitionSpec | None]:
        """Return one spec per array among the arguments."""
        if self.batch is None or isinstance(self.batch, PartitionSpec):
            return [self.batch for each in signature if isinstance(each, tf.TensorSpec)]
        args, kwargs = arguments
        is_spec: Callable[[Any], bool] = lambda each: each is None or isinstance(each, PartitionSpec)  # noqa: E731
        try:
            full = jax.tree.leaves(jax.tree.broadcast(tuple(self.batch), args, is_leaf=is_spec), is_leaf=is_spec)
        except ValueError as error:
            raise ValueError(f"batch={self.batch!r} does not fit the arguments of {self.__name__}: {error}") from None
        full += [None] * len(jax.tree.leaves(kwargs))
        return [spec for spec, each in zip(full, signature, strict=True) if isinstance(each, tf.TensorSpec)]


def function(
    call: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    variables: Variables | None = None,
    shardings: Rule | None = None,
    batch: PartitionSpec | tuple[Any, ...] | None = None,
    donate: bool = True,
) -> Any:
    """Make a TensorFlow function run on a mesh. Usable as a decorator, with or without arguments.

    Args:
      call: A `tf.function`, a Keras model or layer, or a Python function of tensors.
      mesh: The mesh to run on. Default: all devices, with the axis `data`.
      variables: The variables of another function, to share them. Replaces `mesh` and `shardings`.
      shardings: The shardings of variables: a dict from regular expressions, which are searched for in the variables'
        names, to PartitionSpecs, or a function of the `tf.Variable`. Optimizer slots without a rule follow their
        variables; other variables without a rule are replicated.
      batch: The PartitionSpec of all arguments, or a tuple with a spec (or a structure of specs) per argument. Default:
        the rows of an argument are cut along the mesh's first axis if they divide evenly, otherwise it is replicated.
      donate: Whether a call donates the memory of the values that it replaces.
    """
    if variables is not None and (mesh is not None or shardings is not None):
        raise ValueError("variables= has its own mesh and shardings: omit mesh= and shardings=")
    if call is None:
        return partial(function, mesh=mesh, variables=variables, shardings=shardings, batch=batch, donate=donate)
    if not callable(call):
        raise TypeError(f"expected a tf.function, a Keras model or a Python function, got {call!r}")
    return Function(call, variables if variables is not None else Variables(mesh, shardings), batch, donate)


def _run(lowered: Lowered, names: list[str], assigned: tuple[str, ...], own: Any, kept: Any, arguments: Any) -> Any:
    values, others = dict(zip(assigned, own, strict=True)), iter(kept)
    captured = [values[name] if name in values else next(others) for name in names]
    return bind(lowered, arguments, captured)


def _named(call: Any, name: str) -> Any:
    call.__name__ = call.__qualname__ = name
    return call


def _is_tensor(leaf: Any) -> bool:
    if isinstance(leaf, tf.Variable | keras.Variable | keras.layers.Layer):
        return False
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _spec(leaf: Any) -> tf.TensorSpec:
    if isinstance(leaf, tf.TensorSpec):
        if not leaf.shape.is_fully_defined():
            raise ValueError(f"XLA requires arguments with static shapes, got {leaf}")
        return leaf
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise tf.errors.UnimplementedError(
            None, None, f"an argument is a {type(leaf).__name__}, but XLA has only dense tensors: pass .to_tensor()"
        )
    try:
        dtype = tf.as_dtype(leaf.dtype)
    except TypeError:
        raise TypeError(f"TensorFlow has no tensors of {leaf.dtype}: {leaf!r}") from None
    return tf.TensorSpec(tuple(leaf.shape), dtype)


def _array(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray | tf.TensorSpec | jax.ShapeDtypeStruct):
        return leaf
    return np.asarray(leaf)
