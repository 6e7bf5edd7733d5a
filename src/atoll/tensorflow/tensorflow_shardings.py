"""Shardings of the variables and the batches of a TensorFlow function on a mesh.

A rule is a dict from regular expressions to PartitionSpecs, or a function of the variable. The first expression found
in a variable's name applies, as in `keras.distribution.LayoutMap`. An optimizer slot without a rule follows its
variable. All other variables without a rule are replicated.
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
    """Return a mesh of all devices with the axis `data`. Raise ValueError if they are on several islands."""
    devices = jax.devices()
    if len(islands := {getattr(each, "slice_index", 0) for each in devices}) > 1:
        raise ValueError(
            f"the {len(devices)} devices are on {len(islands)} islands, and a compiled function runs on one: pass "
            "mesh=Mesh(devices of one island, ('data',)). For one replica per island, use one `Variables` per island"
        )
    return Mesh(np.array(devices), ("data",))


def variable_name(variable: tf.Variable) -> str:
    """Return a name such as `dense/kernel`, which is also the `path` of a Keras variable."""
    return str(variable.name).removesuffix(":0")


def variable_specs(variables: Sequence[tf.Variable], rule: Rule | None, mesh: Mesh) -> list[PartitionSpec]:
    """Return the PartitionSpecs of variables that are used together. Raise ValueError if one does not fit."""
    named = [_named(each, rule) for each in variables]
    found = []
    for variable, spec in zip(variables, named, strict=True):
        spec = spec if spec is not None else _followed(variable, variables, named)
        check(spec, _shape(variable), mesh, f"the variable {variable_name(variable)!r}")
        found.append(spec)
    return found


def _shape(variable: tf.Variable) -> tuple[int, ...]:
    """Return the variable's shape, or the shape of its value if the variable's is not fully defined."""
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
    """Return the spec of the variable that an optimizer slot belongs to, or the empty spec.

    The slot's name contains the name of its variable, and both have the same shape.
    """
    own = variable_name(variable).replace("/", "_")
    origins = [
        (len(variable_name(each)), spec)
        for each, spec in zip(variables, named, strict=True)
        if spec is not None and each.shape == variable.shape and variable_name(each).replace("/", "_") in own
    ]
    return max(origins, key=lambda origin: origin[0])[1] if origins else PartitionSpec()


def check(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh, what: str) -> None:
    """Raise ValueError if `spec` does not divide an array of this shape. `what` names the array in the message."""
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"the sharding of {what} must be a jax.sharding.PartitionSpec, got {spec!r}")
    if len(spec) > len(shape):
        raise ValueError(f"{what} has the shape {shape}, but {spec} names {len(spec)} axes")
    for axis, names in enumerate(spec):
        names = names if isinstance(names, tuple) else (names,)
        parts = 1
        for name in names:
            if name is None or name is PartitionSpec.UNCONSTRAINED:
                continue
            if name not in mesh.shape:
                raise ValueError(f"{spec} of {what} names the axis {name!r}, but the mesh has {tuple(mesh.shape)}")
            parts *= mesh.shape[name]
        if shape[axis] % parts:
            raise ValueError(
                f"{what} has the shape {shape}: its axis {axis} cannot be cut into {parts} equal parts for {spec}"
            )


def batch_sharding(spec: PartitionSpec | None, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return the sharding of an argument.

    Without a spec, the rows are cut along the mesh's first axis (data parallelism) if they divide evenly. Otherwise the
    argument is replicated.
    """
    if spec is None:
        axis = mesh.axis_names[0]
        spec = PartitionSpec(axis) if shape and shape[0] and shape[0] % mesh.shape[axis] == 0 else PartitionSpec()
    elif len(shape) < len(spec):
        spec = PartitionSpec(*tuple(spec)[: len(shape)])
    check(spec, shape, mesh, "an argument")
    return NamedSharding(mesh, spec)
