"""The values of tf.Variables as sharded arrays on a mesh.

Invariant: from a variable's first use on, the array holds its value. `write_back` assigns the arrays to the
`tf.Variable`s, and `load` does the reverse. Exception: the program may set a variable with one element that no function
assigns, such as a learning rate, so each call reads it from the `tf.Variable`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding

from atoll.quantities import counted
from atoll.tensorflow.tensorflow_shardings import Rule, default_mesh, variable_name, variable_specs


class Variables(Mapping[str, jax.Array]):
    """A mapping from names to arrays. Functions with the same instance share their variables.

    The mapping also holds large captured tensors, under the name `constant`. Two instances on two meshes are two
    replicas of the same tf.Variables.

    Args:
      mesh: The mesh of the arrays. Default: all devices, with the axis `data`.
      shardings: A dict from regular expressions to PartitionSpecs, or a function of the variable (`Rule`).
    """

    def __init__(self, mesh: Mesh | None = None, shardings: Rule | None = None) -> None:
        self.mesh = mesh if mesh is not None else default_mesh()
        self.shardings = shardings
        self.lock = threading.RLock()  # held from reading the arrays for a call until the new arrays are stored
        self._names: dict[Any, str] = {}  # by variable.ref(), or by the id of a captured tensor
        self._sources: dict[str, Any] = {}  # tf.Variables and captured tensors
        self._arrays: dict[str, jax.Array] = {}
        self._settable: dict[str, np.ndarray[Any, Any]] = {}  # values read last from tf.Variables that programs set

    def __getitem__(self, name: str | Any) -> jax.Array:
        """Return the array by name, tf.Variable or Keras variable. Raise KeyError if no function has used it."""
        return self._arrays[name if isinstance(name, str) else self._name_of(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        size = sum(self._arrays[name].nbytes for name in self)
        devices = counted(self.mesh.size, "device")
        return f"Variables({counted(len(self), 'variable')}, {size:,} bytes in total, on {devices})"

    def write_back(self, variables: Iterable[Any] | None = None) -> None:
        """Assign the arrays' values to the given tf.Variables, or to all. Waits for the arrays."""
        with self.lock:
            names = self._chosen(variables)
            for name, value in zip(names, jax.device_get([self._arrays[name] for name in names]), strict=True):
                self._sources[name].assign(value)

    def load(self, variables: Iterable[Any] | None = None) -> None:
        """Copy the values of the given tf.Variables, or of all, to the arrays. Call it after assigning tf.Variables."""
        with self.lock:
            names = self._chosen(variables)
            self._put(names, [self._arrays[name].sharding for name in names])

    def place(self, sources: Sequence[Any], assigned: Iterable[Any]) -> list[str]:
        """Put the captures of a function on the mesh, unless they are there already, and return their names."""
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
        """Copy the values of those variables that the program sets and has changed."""
        for name in names:
            if name in self._settable and self._settable[name] != self._sources[name].numpy():
                self._put([name], [self._arrays[name].sharding])

    def update(self, values: Mapping[str, jax.Array]) -> None:
        """Replace arrays by name with the results of a `Functional`. Meshes and shardings are not checked."""
        with self.lock:
            if unknown := set(values) - set(self._arrays):
                raise KeyError(f"no function here has used the variables {sorted(unknown)}")
            self._arrays.update(values)

    def _put(self, names: Sequence[str], shardings: Sequence[Any]) -> None:
        # TensorFlow's counters and seeds have 64 bits, independent of JAX's configuration.
        with jax.enable_x64(True):
            # Copy, because a program may assign a tf.Variable while JAX still reads its buffer.
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
