"""What a host asks its client's Python while XLA compiles there, and what it answers.

A program has custom calls whose shardings and parts the client's Python decides: `custom_partitioning`, and
`inspect_array_sharding`, which is only shown a sharding. XLA's shapes travel as XLA writes them, f32[8,4]{1,0}, and its
shardings and programs in its serialized forms. A request is one array of bytes of a call
(`host_services.calls.call_messages`), and so is its answer.

Each host of a program compiles it, and asks the same. `occurrence` counts the equal requests of one compilation: so the
client runs its Python as often as one compilation needs, and all hosts have the same answers.
"""

from __future__ import annotations

import msgspec

# The custom calls that ask, by their targets in XLA.
INSPECT_SHARDING = "InspectSharding"
CUSTOM_PARTITIONING = "CustomSPMDPartitioning"

# What the keys of transformations begin with; the stage of XLA's pipeline and a name follow, with colons between.
TRANSFORMATION = b"transformation"


class Value(msgspec.Struct, frozen=True, array_like=True):
    """An operand or a result, with its OpSharding, where it has one yet."""

    shape: str
    sharding: bytes | None = None


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="i"):
    """The sharding that the value has. Nothing is answered."""

    sharding: bytes
    occurrence: int = 0


class Propagate(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Which sharding the result should have, for the sharding that its user wants."""

    result: Value
    occurrence: int = 0


class Infer(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Which sharding the result has, by those of the operands."""

    operands: tuple[Value, ...]
    result: Value
    occurrence: int = 0


class Partition(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """What each device is to compute, and with which shardings."""

    operands: tuple[Value, ...]
    result: Value
    occurrence: int = 0


class Transform(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """What becomes of an HloModuleProto. The answer's program is another one, or empty: it stays as it is."""

    module: bytes
    occurrence: int = 0


CompileCall = Inspect | Propagate | Infer | Partition | Transform


class CompileAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The result's sharding, if there is one; of Partition, also the operands' and a portable artifact.

    Of Transform, an HloModuleProto alone.
    """

    result: bytes | None = None
    operands: tuple[bytes, ...] = ()
    program: bytes = b""
