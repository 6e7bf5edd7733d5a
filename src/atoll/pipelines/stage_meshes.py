"""Shardings of parameters and batches on the stages' meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import PipelineError


def fitted(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return the spec without axes that the mesh does not have or that do not divide the shape."""
    fits = []
    for size, names in zip(shape, [*spec, *[None] * len(shape)], strict=False):
        several = (names,) if isinstance(names, str) else tuple(names or ())
        count = 1
        for name in several:
            count *= dict(mesh.shape).get(name, 0)
        fits.append(names if several and count and size % count == 0 else None)
    return PartitionSpec(*fits)


def moved(array: Any, mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array on `mesh`, based on its sharding on another stage's mesh."""
    return NamedSharding(mesh, fitted(_spec(array), array.shape, mesh))


def parameter_sharding(leaf: Any, spec: PartitionSpec | None, mesh: Mesh, name: str) -> NamedSharding:
    """Return the sharding of a parameter, from the user's spec or else based on the array's current sharding."""
    if spec is None:
        return moved(leaf, mesh)
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


def _check(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, name: str) -> None:
    if fitted(spec, shape, mesh) != PartitionSpec(*spec, *[None] * (len(shape) - len(spec))):
        raise PipelineError(
            f"{name} has the shape {list(shape)}, which {spec} cannot divide on a mesh of {dict(mesh.shape)}"
        )


def _spec(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
