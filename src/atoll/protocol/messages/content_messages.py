"""Structures that messages carry as encoded bytes, so that only the processes that use them decode them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.ir.outline import Outline


class OutputInfo(msgspec.Struct, frozen=True, array_like=True):
    """One output of a compiled function."""

    dtype: str
    shape: tuple[int, ...]
    op_sharding: bytes | None  # serialized xla.OpSharding; None if the program is not partitioned
    memory_kind: str
    layout: bytes  # in XLA's text form, such as {1,0}; empty if XLA has none


class FunctionInfo(msgspec.Struct, frozen=True, array_like=True):
    """A worker's report about a compiled function, for the proxy. The controller reads it as `FunctionOutputs`."""

    name: str
    fingerprint: bytes
    parameter_shardings: tuple[bytes, ...] | None
    parameter_layouts: tuple[bytes, ...]  # in XLA's text form; empty if XLA has none
    outputs: tuple[OutputInfo, ...]
    donated: tuple[int, ...]
    memory_stats: dict[str, int]
    generated_code_bytes: int
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape of one shard
    outline: Outline | None = None  # of an IFRT IR program, which is no function and has only a name besides


class OutputType(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first fields of an `OutputInfo`."""

    dtype: str
    shape: tuple[int, ...]


class FunctionOutputs(msgspec.Struct, frozen=True, array_like=True):
    """The part of an encoded `FunctionInfo` that the controller reads, with fields at the same positions."""

    name: msgspec.Raw
    fingerprint: msgspec.Raw
    parameter_shardings: msgspec.Raw
    parameter_layouts: msgspec.Raw
    outputs: tuple[OutputType, ...]
    donated: tuple[int, ...]
    memory_stats: dict[str, int]


class MemoryHolder(msgspec.Struct, frozen=True, array_like=True):
    """The buffers on one device that one program created for one Python stack of the client. Sizes are in bytes."""

    traceback_id: int  # the client's number for the stack; 0 if another client's or unknown
    producer: str
    ready: int
    ready_bytes: int
    unready: int
    unready_bytes: int


class MemoryReport(msgspec.Struct, frozen=True, array_like=True):
    """The holders of a device's memory, largest first."""

    device: str
    holders: tuple[MemoryHolder, ...]


# Key of the `MemoryReport` in the payloads of a RESOURCE_EXHAUSTED status.
MEMORY_REPORT = "atoll.memory_report"


class HostChannels(msgspec.Struct, frozen=True, array_like=True):
    """XLA's host channels of a callback in a TPU program, one per argument and one per result, in order."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]


# The stages of a call for which a library can have handlers.
LibraryStage = Literal["instantiate", "prepare", "initialize", "execute"]
# The place of a handler or a type in a library: its symbol, or its offset from the address where the library begins.
LibraryPlace = Annotated[str, msgspec.Meta(max_length=1024)] | Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LibraryType(msgspec.Struct, frozen=True, array_like=True):
    """A type of the states that handlers keep: the places of its XLA_FFI_TypeId and, if given, XLA_FFI_TypeInfo."""

    name: Annotated[str, msgspec.Meta(max_length=200)]
    type_id: LibraryPlace
    type_info: LibraryPlace | None = None


class LibraryTarget(msgspec.Struct, frozen=True, array_like=True):
    """A custom call target of a program, which is in a shared library of the client.

    `library` is the hash of the file. `handlers` are (stage, place), such as ("execute", "RmsNorm"). XLA has to know
    the library's `types` before the handlers.
    """

    name: Annotated[str, msgspec.Meta(max_length=1024)]
    library: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    handlers: Annotated[tuple[tuple[LibraryStage, LibraryPlace], ...], msgspec.Meta(min_length=1, max_length=4)]
    types: Annotated[tuple[LibraryType, ...], msgspec.Meta(max_length=64)] = ()
    is_batch_partitionable: bool = False


class FunctionSource(msgspec.Struct, frozen=True, array_like=True):
    """A function to compile: the program's bytes and XLA's serialized CompileOptions.

    If `fragment` is set, the program is an IFRT IR program. The function is one of its fragments, as (name, mesh). With
    two empty names, it is no function: the answer is the program's outline.

    `callbacks` are the client's numbers of the Python functions that the program calls; with callbacks, only `session`
    can use the function. XLA calls the last of them during compilation, and `keys` has their keys in the program. For
    TPUs, `channels` has the channels of the others. With `is_python`, the program is an encoded `PythonProgram`, and
    `options` only makes it unique. With `is_library`, the program is the file of a shared library, which the host
    loads. `targets` are the program's custom calls of such libraries.
    """

    program: bytes
    options: bytes
    session: int = 0
    callbacks: tuple[int, ...] = ()
    is_python: bool = False
    keys: tuple[bytes, ...] = ()
    channels: tuple[HostChannels, ...] = ()
    fragment: tuple[str, str] | None = None
    targets: tuple[LibraryTarget, ...] = ()
    is_library: bool = False
