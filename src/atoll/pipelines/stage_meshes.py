"""How parameters and batches lie on the stages' meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import PipelineError


def fitted(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The spec as far as the mesh has its axes and they divide the shape."""
    fits = []
    for size, names in zip(shape, [*spec, *[None] * len(shape)], strict=False):
        several = (names,) if isinstance(names, str) else tuple(names or ())
        count = 1
        for name in several:
            count *= dict(mesh.shape).get(name, 0)
        fits.append(names if several and count and size % count == 0 else None)
    return PartitionSpec(*fits)


def moved(array: Any, mesh: Mesh) -> NamedSharding:
    """How an array lies on the mesh that lies so on another stage's."""
    return NamedSharding(mesh, fitted(_spec(array), array.shape, mesh))


def parameter_sharding(leaf: Any, spec: PartitionSpec | None, mesh: Mesh, name: str) -> NamedSharding:
    """As the user's spec says, or as the array lies where it is."""
    if spec is None:
        return moved(leaf, mesh)
    _check(spec, leaf.shape, mesh, name)
    return NamedSharding(mesh, spec)


def batch_sharding(shape: Sequence[int], spec: PartitionSpec | None, mesh: Mesh, name: str) -> NamedSharding:
    """Of a micro-batch's leaf; unless the user says it, data-parallel over the mesh's first axis."""
    if not shape:
        return NamedSharding(mesh, PartitionSpec())
    if spec is None:
        spec = PartitionSpec(mesh.axis_names[0])
    _check(spec, shape, mesh, f"a micro-batch of {name}")
    return NamedSharding(mesh, spec)


def check_apart(replicas: Sequence[Sequence[Mesh]]) -> None:
    """Raises PipelineError where two replicas have a device in common: they would compute one after the other."""
    replica_of: dict[Any, int] = {}
    for number, meshes in enumerate(replicas):
        for mesh in meshes:
            for device in mesh.devices.flat:
                if replica_of.setdefault(device, number) != number:
                    raise PipelineError(
                        f"replicas {replica_of[device]} and {number} both have {device}: each replica has devices of "
                        "its own"
                    )


def _check(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh, name: str) -> None:
    if fitted(spec, shape, mesh) != PartitionSpec(*spec, *[None] * (len(shape) - len(spec))):
        raise PipelineError(f"{name}, of shape {list(shape)}, cannot lie as {spec} on a mesh of {dict(mesh.shape)}")


def _spec(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
