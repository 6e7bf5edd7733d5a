"""The user's trees of parameters and batches as flat lists of named arrays, and their shardings on stages' meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import PipelineError
from atoll.pipelines.computation import structure
from atoll.quantities import counted


class Parameters:
    """A tree of parameters: its arrays, which are parameters, and its other leaves, which are constants."""

    def __init__(self, tree: Any, specs: Any) -> None:
        paths, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        every = _spread(specs, tree, "param_specs")
        self._fixed = {i: leaf for i, (_, leaf) in enumerate(paths) if not is_array(leaf)}
        places = [i for i in range(len(paths)) if i not in self._fixed]
        self.arrays = [paths[i][1] for i in places]
        self.names = [f"params{jax.tree_util.keystr(paths[i][0])}" for i in places]
        self.specs = [every[i] for i in places]
        self.types = [structure(jax.typeof(array)) for array in self.arrays]

    def tree_of(self, arrays: Sequence[Any], fixed: bool = True) -> Any:
        """Return the tree with these arrays. Without `fixed`, the other leaves are None."""
        left = iter(arrays)
        leaves = [
            (self._fixed[i] if fixed else None) if i in self._fixed else next(left)
            for i in range(self.structure.num_leaves)
        ]
        return jax.tree.unflatten(self.structure, leaves)


class Batch:
    """The structure and types of a batch, and of its micro-batches. `microbatches` is the number per replica."""

    def __init__(self, tree: Any, specs: Any, microbatches: int, replicas: int = 1) -> None:
        self.replicas = replicas
        paths, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.specs = _spread(specs, tree, "batch_specs")
        self.names = [f"batch{jax.tree_util.keystr(path)}" for path, _ in paths]
        self.types = [self._type(leaf, name) for (_, leaf), name in zip(paths, self.names, strict=True)]
        rows = {name: each.shape[0] for name, each in zip(self.names, self.types, strict=True) if each.shape}
        if len(set(rows.values())) > 1:
            raise PipelineError(f"all leaves of a batch must have the same number of rows, got {rows}")
        for name, count in rows.items():
            if count % (replicas * microbatches):
                of = f"{replicas} replicas of " if replicas > 1 else ""
                raise PipelineError(
                    f"{name} has {counted(count, 'row')}, which cannot be cut into {of}{microbatches} micro-batches"
                )
        self.microbatch_types = [
            jax.ShapeDtypeStruct((each.shape[0] // (replicas * microbatches), *each.shape[1:]), each.dtype)
            if each.shape
            else each
            for each in self.types
        ]

    def _type(self, leaf: Any, name: str) -> jax.ShapeDtypeStruct:
        try:
            return structure(jax.typeof(leaf))
        except TypeError:
            raise PipelineError(f"{name} must be an array, got {type(leaf)}") from None

    def tree_of(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.structure, leaves)

    def leaves_of(self, batch: Any) -> list[Any]:
        """Return the leaves of a batch. Raise PipelineError if its structure or types differ from this batch's.

        With several replicas, each NumPy leaf is split into a list of one array per replica.
        """
        leaves: list[Any]
        leaves, tree = jax.tree.flatten(batch)
        if tree != self.structure:
            raise PipelineError(f"init got a batch with the structure {self.structure}, but step got {tree}")
        for leaf, name, wanted in zip(leaves, self.names, self.types, strict=True):
            got = self._type(leaf, name)
            if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
                raise PipelineError(
                    f"{name} is {got.dtype}{list(got.shape)}, but init cut the model for {wanted.dtype}"
                    f"{list(wanted.shape)}: call init again for a different kind of batch"
                )
        if self.replicas == 1:
            return leaves
        return [
            np.split(leaf, self.replicas) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf for leaf in leaves
        ]


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of JAX or NumPy. Python numbers are constants of a model."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def fitting_spec(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the spec without axes that the mesh does not have or that do not divide the shape."""
    fits = []
    for size, names in zip(shape, [*spec, *[None] * len(shape)], strict=False):
        several = (names,) if isinstance(names, str) else tuple(names or ())
        count = 1
        for name in several:
            count *= dict(mesh.shape).get(name, 0)
        fits.append(names if several and count and size % count == 0 else None)
    return PartitionSpec(*fits)


def moved_sharding(array: Any, mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array on `mesh`, based on its sharding on another stage's mesh."""
    return NamedSharding(mesh, fitting_spec(_spec(array), array.shape, mesh))


def parameter_sharding(leaf: Any, spec: PartitionSpec | None, mesh: Mesh, name: str) -> NamedSharding:
    """Return the sharding of a parameter, from the user's spec or else based on the array's current sharding."""
    if spec is None:
        return moved_sharding(leaf, mesh)
    _check(spec, leaf.shape, mesh, name)
    return NamedSharding(mesh, spec)


def batch_sharding(shape: Sequence[int], spec: PartitionSpec | None, mesh: Mesh, name: str) -> NamedSharding:
    """Return the sharding of a micro-batch's leaf. Without a spec, rows are cut along the mesh's first axis."""
    if not shape:
        return NamedSharding(mesh, PartitionSpec())
    if spec is None:
        spec = PartitionSpec(mesh.axis_names[0])
    _check(spec, shape, mesh, f"a micro-batch of {name}")
    return NamedSharding(mesh, spec)


def check_apart(replicas: Sequence[Sequence[Mesh]]) -> None:
    """Raise PipelineError if two replicas share a device, because they would compute one after the other."""
    replica_of: dict[Any, int] = {}
    for number, meshes in enumerate(replicas):
        for mesh in meshes:
            for device in mesh.devices.flat:
                if replica_of.setdefault(device, number) != number:
                    raise PipelineError(
                        f"replicas {replica_of[device]} and {number} both use {device}: give each replica its own "
                        "devices"
                    )


def _spread(specs: Any, tree: Any, name: str) -> list[PartitionSpec | None]:
    """Return a spec for each leaf of `tree`, from a prefix of the tree with specs."""

    def is_spec(each: Any) -> bool:
        return each is None or isinstance(each, PartitionSpec)

    found: list[PartitionSpec | None] = []
    try:
        jax.tree.map(
            lambda spec, below: found.extend([spec] * len(jax.tree.leaves(below))), specs, tree, is_leaf=is_spec
        )
    except ValueError as error:
        raise PipelineError(f"{name} is not a prefix of the tree: {error}") from None
    return found


def _check(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, name: str) -> None:
    axes = {axis for entry in spec if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))}
    if unknown := axes - set(mesh.axis_names):
        raise PipelineError(
            f"{name} has the spec {spec}, but the mesh of its stage has no axis "
            f"{', '.join(map(repr, sorted(unknown)))}: its axes are {', '.join(map(repr, mesh.axis_names))}"
        )
    if fitting_spec(spec, shape, mesh) != PartitionSpec(*spec, *[None] * (len(shape) - len(spec))):
        raise PipelineError(
            f"{name} has the shape {list(shape)}, which {spec} cannot divide on a mesh of {dict(mesh.shape)}"
        )


def _spec(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
