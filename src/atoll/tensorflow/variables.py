"""The values of tf.Variables as sharded arrays on a mesh.

Invariant: from its first use on, the array is a variable's value; the `tf.Variable` has it again after `write_back`,
and gives its own with `load`. One exception: a variable of one element that no function assigns, such as a learning
rate, is the program's to set, so each call takes what the `tf.Variable` says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding

from atoll.tensorflow.tensorflow_shardings import Rule, default_mesh, variable_name, variable_specs


class Variables(Mapping[str, jax.Array]):
    """A mapping from names to arrays; functions that are given the same one share their variables.

    A large tensor that a function captures is in it, too, as `constant`.
    Two of them, on two meshes, are two replicas of the same tf.Variables.

    Args:
      mesh: Where the arrays are; all devices, as the axis `data`, without one.
      shardings: How variables are cut: a dict of regular expressions, or a function of the variable (`Rule`).
    """

    def __init__(self, mesh: Mesh | None = None, shardings: Rule | None = None) -> None:
        self.mesh = mesh if mesh is not None else default_mesh()
        self.shardings = shardings
        self.lock = threading.RLock()  # held from reading the arrays of a call until its new ones are in their places
        self._names: dict[Any, str] = {}  # by variable.ref(), or the identity of a captured tensor
        self._sources: dict[str, Any] = {}  # the tf.Variable, or the captured tensor
        self._arrays: dict[str, jax.Array] = {}
        self._settable: dict[str, np.ndarray[Any, Any]] = {}  # what the tf.Variable said last

    def __getitem__(self, name: str | Any) -> jax.Array:
        """By name, or by the tf.Variable or Keras variable. KeyError where no function has used it."""
        return self._arrays[name if isinstance(name, str) else self._name_of(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        size = sum(self._arrays[name].nbytes for name in self)
        return f"Variables({len(self)} of {size:,} bytes in all, on {self.mesh.size} devices)"

    def write_back(self, variables: Iterable[Any] | None = None) -> None:
        """Assigns the arrays' values to the tf.Variables: to these, or to all. Waits for them."""
        with self.lock:
            names = self._chosen(variables)
            for name, value in zip(names, jax.device_get([self._arrays[name] for name in names]), strict=True):
                self._sources[name].assign(value)

    def load(self, variables: Iterable[Any] | None = None) -> None:
        """Takes the values of the tf.Variables, those of these or of all: after a program assigned them itself."""
        with self.lock:
            names = self._chosen(variables)
            self._put(names, [self._arrays[name].sharding for name in names])

    def place(self, sources: Sequence[Any], assigned: Iterable[Any]) -> list[str]:
        """The names under which what a function captures is kept; puts on the mesh what is not there yet."""
        with self.lock:
            new = [each for each in sources if _key(each) not in self._names]
            variables = [each for each in new if isinstance(each, tf.Variable)]
            known = [each for each in self._sources.values() if isinstance(each, tf.Variable)]
            specs = variable_specs([*variables, *known], self.shardings, self.mesh)
            spec_of = {_key(each): spec for each, spec in zip(variables, specs, strict=False)}
            names, shardings = [], []
            for each in new:
                name = self._free_name(variable_name(each) if isinstance(each, tf.Variable) else "constant")
                self._names[_key(each)] = name
                self._sources[name] = each
                names.append(name)
                spec = spec_of.get(_key(each), jax.sharding.PartitionSpec())
                shardings.append(NamedSharding(self.mesh, spec))
                if isinstance(each, tf.Variable) and each.shape.num_elements() == 1:
                    self._settable[name] = np.array([])
            self._put(names, shardings)
            found = [self._names[_key(each)] for each in sources]
            for each in assigned:
                self._settable.pop(self._names[_key(each)], None)
            return found

    def take_settings(self, names: Iterable[str]) -> None:
        """Of these, takes the values of those that the program sets, where they have changed."""
        for name in names:
            if name in self._settable and self._settable[name] != self._sources[name].numpy():
                self._put([name], [self._arrays[name].sharding])

    def update(self, values: Mapping[str, jax.Array]) -> None:
        """New arrays by name, as a `Functional` gives them; their meshes and shardings stay the caller's business."""
        with self.lock:
            if unknown := set(values) - set(self._arrays):
                raise KeyError(f"no function here has used the variables {sorted(unknown)}")
            self._arrays.update(values)

    def _put(self, names: Sequence[str], shardings: Sequence[Any]) -> None:
        # TensorFlow's counters and seeds have 64 bits, whatever JAX is set to.
        with jax.enable_x64(True):
            # Copies: a tf.Variable may be assigned while its buffer is still being read.
            values = [np.array(_value(self._sources[name])) for name in names]
            arrays = jax.device_put(values, list(shardings))
        for name, value, array in zip(names, values, arrays, strict=True):
            self._arrays[name] = array
            if name in self._settable:
                self._settable[name] = value

    def _chosen(self, variables: Iterable[Any] | None) -> list[str]:
        if variables is not None:
            return [self._name_of(each) for each in variables]
        return [name for name, source in self._sources.items() if isinstance(source, tf.Variable)]

    def _name_of(self, variable: Any) -> str:
        found = self._names.get(_key(getattr(variable, "value", variable) if _is_keras(variable) else variable))
        if found is None:
            raise KeyError(f"no function here has used the variable {getattr(variable, 'name', variable)!r}")
        return found

    def _free_name(self, name: str) -> str:
        found, number = name, 1
        while found in self._sources:
            found, number = f"{name}_{number}", number + 1
        return found


def _is_keras(variable: Any) -> bool:
    return not isinstance(variable, tf.Variable) and isinstance(getattr(variable, "value", None), tf.Variable)


def _key(source: Any) -> Any:
    return source.ref() if hasattr(source, "ref") else id(source)


def _value(source: Any) -> Any:
    if isinstance(source, tf.Variable) and not source.is_initialized():
        raise tf.errors.FailedPreconditionError(None, None, f"the variable {source.name!r} has no value yet")
    return source.numpy()
