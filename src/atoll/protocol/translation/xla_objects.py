"""Translation between jaxlib's objects for shardings and programs and their serialized forms, in processes with JAX."""

from __future__ import annotations

from typing import Any


def sharding_from_bytes(proto: bytes) -> Any:
    """Return the HloSharding of a serialized OpSharding.

    XLA ends the process for some invalid shardings. Check untrusted ones with `shardings.check_parts` before.
    """
    from jax._src.lib import xla_client

    sharding = xla_client.OpSharding()
    sharding.ParseFromString(proto)
    return xla_client.HloSharding.from_proto(sharding)


def sharding_to_bytes(sharding: Any) -> bytes:
    return bytes(sharding.to_proto().SerializeToString())


def portable_artifact(program: bytes) -> bytes:
    """Return a module, given as bytecode or text, in the form that other versions of jaxlib can read."""
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    with mlir.make_ir_context():
        module = ir.Module.parse(program)
        return bytes(_jax.mlir.serialize_portable_artifact(module, hlo.get_current_version(), True))
