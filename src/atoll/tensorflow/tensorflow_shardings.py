"""How the variables and the batches of a TensorFlow function are cut over a mesh.

A rule says it by name: a dict from regular expressions to PartitionSpecs, of which the first that is found in a
variable's name counts, as in `keras.distribution.LayoutMap`; or a function of the variable. What no rule names follows
the variable for which it was made (an optimizer's slot), or else is whole on each device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rule = Mapping[str, PartitionSpec] | Callable[[Any], PartitionSpec | None]


def default_mesh() -> Mesh:
    """All devices, as the axis `data`. Raises ValueError where they are on several islands."""
    devices = jax.devices()
    if len(islands := {getattr(each, "slice_index", 0) for each in devices}) > 1:
        raise ValueError(
            f"the {len(devices)} devices are on {len(islands)} islands, and a compiled function runs on one: give it "
            "mesh=Mesh(devices of one, ('data',)); a replica on each island is a tf.Variables of its own"
        )
    return Mesh(np.array(devices), ("data",))


def variable_name(variable: tf.Variable) -> str:
    """`dense/kernel`: what a Keras variable's `path` is, too."""
    return str(variable.name).removesuffix(":0")


def variable_specs(variables: Sequence[tf.Variable], rule: Rule | None, mesh: Mesh) -> list[PartitionSpec]:
    """The PartitionSpec of each of these, which are used together. Raises ValueError where one does not fit."""
    named = [_named(each, rule) for each in variables]
    found = []
    for variable, spec in zip(variables, named, strict=True):
        spec = spec if spec is not None else _followed(variable, variables, named)
        check(spec, _shape(variable), mesh, f"the variable {variable_name(variable)!r}")
        found.append(spec)
    return found


def _shape(variable: tf.Variable) -> tuple[int, ...]:
    """That of its value, where its own leaves some sizes open."""
    return tuple(variable.shape if variable.shape.is_fully_defined() else variable.read_value().shape)


def _named(variable: tf.Variable, rule: Rule | None) -> PartitionSpec | None:
    if rule is None:
        return None
    if not isinstance(rule, Mapping):
        return rule(variable)
    for pattern, spec in rule.items():
        if re.search(pattern, variable_name(variable)):
            return spec
    return None


def _followed(
    variable: tf.Variable, variables: Sequence[tf.Variable], named: Sequence[PartitionSpec | None]
) -> PartitionSpec:
    """A slot's name has that of its variable in it, and it has the same shape."""
    own = variable_name(variable).replace("/", "_")
    origins = [
        (len(variable_name(each)), spec)
        for each, spec in zip(variables, named, strict=True)
        if spec is not None and each.shape == variable.shape and variable_name(each).replace("/", "_") in own
    ]
    return max(origins, key=lambda origin: origin[0])[1] if origins else PartitionSpec()


def check(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh, what: str) -> None:
    """Raises ValueError where an array of that shape cannot be cut so; `what` it is, for the message."""
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"the sharding of {what} is {spec!r}, and has to be a jax.sharding.PartitionSpec")
    if len(spec) > len(shape):
        raise ValueError(f"{what} has the shape {shape}, and {spec} names {len(spec)} axes of it")
    for axis, names in enumerate(spec):
        names = names if isinstance(names, tuple) else (names,)
        parts = 1
        for name in names:
            if name is None or name is PartitionSpec.UNCONSTRAINED:
                continue
            if name not in mesh.shape:
                raise ValueError(f"{spec} of {what} names the axis {name!r}, and the mesh has {tuple(mesh.shape)}")
            parts *= mesh.shape[name]
        if shape[axis] % parts:
            raise ValueError(
                f"{what} has the shape {shape}: its axis {axis} cannot be cut into {parts} equal parts, as {spec} asks"
            )


def batch_sharding(spec: PartitionSpec | None, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """That of an argument. Without a spec its rows are over the mesh's first axis, where they can be: data parallel."""
    if spec is None:
        axis = mesh.axis_names[0]
        spec = PartitionSpec(axis) if shape and shape[0] and shape[0] % mesh.shape[axis] == 0 else PartitionSpec()
    elif len(shape) < len(spec):
        spec = PartitionSpec(*tuple(spec)[: len(shape)])
    check(spec, shape, mesh, "an argument")
    return NamedSharding(mesh, spec)
