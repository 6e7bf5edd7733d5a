"""What messages carry as bytes: only who uses it decodes it."""

from __future__ import annotations

import msgspec


class OutputInfo(msgspec.Struct, frozen=True, array_like=True):
    """One output of a compiled function."""

    dtype: str
    shape: tuple[int, ...]
    op_sharding: bytes | None  # serialized xla.OpSharding; None where the program is not partitioned
    memory_kind: str
    layout: bytes  # in XLA's text form, such as {1,0}; empty where XLA has none


class FunctionInfo(msgspec.Struct, frozen=True, array_like=True):
    """A worker's report about a compiled function. The proxy reads it, and the controller a part of it."""

    name: str
    fingerprint: bytes
    parameter_shardings: tuple[bytes, ...] | None
    parameter_layouts: tuple[bytes, ...]  # in XLA's text form; none where XLA gives none
    outputs: tuple[OutputInfo, ...]
    donated: tuple[int, ...]
    memory_stats: dict[str, int]
    generated_code_bytes: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of one shard


class OutputType(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of an `OutputInfo`."""

    dtype: str
    shape: tuple[int, ...]


class FunctionOutputs(msgspec.Struct, frozen=True, array_like=True):
    """The part of an encoded `FunctionInfo` that the controller reads. Its fields stand at the same positions."""

    name: msgspec.Raw
    fingerprint: msgspec.Raw
    parameter_shardings: msgspec.Raw
    parameter_layouts: msgspec.Raw
    outputs: tuple[OutputType, ...]
    donated: tuple[int, ...]
    memory_stats: dict[str, int]


class MemoryHolder(msgspec.Struct, frozen=True, array_like=True):
    """Buffers on one device that one program made for one stack of the client; sizes in bytes."""

    traceback_id: int  # the client's number for the stack; 0: not its own, or not known
    producer: str
    ready: int
    ready_bytes: int
    unready: int
    unready_bytes: int


class MemoryReport(msgspec.Struct, frozen=True, array_like=True):
    """Who holds a device's memory, the largest first."""

    device: str
    holders: tuple[MemoryHolder, ...]


# The payload of a RESOURCE_EXHAUSTED status in which a `MemoryReport` travels to the proxy.
MEMORY_REPORT = "atoll.memory_report"


class HostChannels(msgspec.Struct, frozen=True, array_like=True):
    """Where a program on a TPU sends what a callback takes, and receives what it returns, in the order of these."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]


class FunctionSource(msgspec.Struct, frozen=True, array_like=True):
    """What a proxy sends for compilation: the program's bytes and XLA's serialized CompileOptions.

    `callbacks` are the client's numbers for the Python that the program calls: such a function is only for `session`.
    The last of them are called while it is compiled; `keys` says what stands for each of these in the program.
    Programs for TPUs have `channels` for each of the others. With `is_python`, the program is an encoded
    `PythonProgram`, and what stands for the options only makes it one of a kind.
    """

    program: bytes
    options: bytes
    session: int = 0
    callbacks: tuple[int, ...] = ()
    is_python: bool = False
    keys: tuple[bytes, ...] = ()
    channels: tuple[HostChannels, ...] = ()
