"""The protocol for callbacks into the client's Python, between the client's plug-in, its proxy and hosts.

jaxlib's client does not send callables. The plug-in numbers them, and sends the numbers in options that it adds to
XLA's compile options and that the proxy removes. Before the first compilation with callbacks, the plug-in runs a
plugin program to get the address at which it receives calls.

XLA also calls the client's Python during compilation: for `custom_partitioning`, and for `inspect_array_sharding`,
which only shows a sharding. A compile call and its answer are each one array of bytes of a call
(`host_services.calls.call_messages`). Shapes have XLA's text form, such as f32[8,4]{1,0}; shardings and programs have
XLA's serialized forms. All hosts of a program compile it and make the same calls. `occurrence` counts equal calls of
one compilation, so that the client runs its Python once for all hosts, and they receive the same answers.
"""

from __future__ import annotations

import msgspec

# The plugin program. The fingerprint of its executable is a `CallbackAddress` in JSON.
CALLBACKS_REQUEST = b"atoll callbacks"

# Compile options, which are sent in `env_option_overrides`, where jaxlib's client forwards any name with its value.
# The program, as a portable artifact in base64, that replaces the one in the request.
PROGRAM_OPTION = "atoll_program"
# The numbers of the client's callables that the program calls, as "FIRST+COUNT", in the order of the program's indices.
CALLBACKS_OPTION = "atoll_callbacks"
# On TPUs, the channels of each of these callables: a list of `HostChannels` in JSON.
CHANNELS_OPTION = "atoll_callback_channels"
# The numbers and the keys (in hexadecimal) of the callables that XLA calls during compilation, as "FIRST:KEY,KEY,...".
COMPILE_CALLS_OPTION = "atoll_compile_calls"

# XLA's custom call targets with which programs make compile calls.
INSPECT_SHARDING = "InspectSharding"
CUSTOM_PARTITIONING = "CustomSPMDPartitioning"

# Prefix of the keys of transformations. The stage of XLA's pipeline and a name follow, separated by colons.
TRANSFORMATION = b"transformation"

# Advice for users in errors of front ends and workers.
CALLBACK_ADVICE = (
    "this program calls back into the client's Python (jax.pure_callback, io_callback or debug.print/callback), which "
    "only Atoll's own plug-in can serve. Install the package atoll, in the cluster's version, where the script runs, "
    "or return the values and use them outside of jit"
)
COMPILE_CALL_ADVICE = (
    "this program calls back into the client's Python while XLA compiles it (jax.debug.inspect_array_sharding, "
    "visualize_array_sharding or custom_partitioning). Only Atoll's own plug-in can serve that, in the process that "
    "lowered the program. Install the package atoll, in the cluster's version, where the script runs"
)


class CallbackAddress(msgspec.Struct, frozen=True):
    """A data port of the proxy. `session` and `secret` open the channel for calls and answers."""

    address: str
    session: int
    secret: str


class Value(msgspec.Struct, frozen=True, array_like=True):
    """An operand or a result, with its OpSharding if it already has one."""

    shape: str
    sharding: bytes | None = None


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="i"):
    """Show the sharding of a value. The answer is empty."""

    sharding: bytes
    occurrence: int = 0


class Propagate(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Request the sharding that the result should have, given the sharding that its user requires."""

    result: Value
    occurrence: int = 0


class Infer(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """Request the sharding of the result, given those of the operands."""

    operands: tuple[Value, ...]
    result: Value
    occurrence: int = 0


class Partition(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Request the program that each device runs, and its shardings."""

    operands: tuple[Value, ...]
    result: Value
    occurrence: int = 0


class Transform(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """Request the transformation of an HloModuleProto. The answer's program is empty if the module does not change."""

    module: bytes
    occurrence: int = 0


CompileCall = Inspect | Propagate | Infer | Partition | Transform


class CompileAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a compile call."""

    result: bytes | None = None  # sharding of the result
    operands: tuple[bytes, ...] = ()  # shardings of the operands, for `Partition`
    program: bytes = b""  # a portable artifact for `Partition`, an HloModuleProto for `Transform`
