"""Messages between a worker, the fork server of its compilers, and a compiler process."""

from __future__ import annotations

import msgspec

from atoll.errors import Status
from atoll.ir.types import ShardType
from atoll.protocol.messages import FunctionInfo, HostChannels

# Dimensions from major to minor; None for the platform's default.
Layout = tuple[int, ...] | None


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """The types that a callable returns, or writes into the buffers that it takes.

    With `channels`, XLA also needs the types that it takes: its `operands`.
    """

    results: tuple[ShardType, ...] = ()
    takes_buffers: bool = False
    operands: tuple[ShardType, ...] = ()
    channels: HostChannels | None = None


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The properties of an executable that a worker needs besides the executable itself."""

    info: FunctionInfo
    parameter_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    scratch_bytes: int  # on each device while it runs


# ---- worker -> compiler process


class CompileProgram(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Compile a program for `replicas` x `partitions` devices of the worker's platform.

    `callbacks` of its client's callables run while the program runs. `keys` are those of the callables that run while
    it is compiled. If the process cannot compile for the platform, it only reads and checks the program.
    """

    program: bytes
    options: bytes
    replicas: int
    partitions: int
    platform: str
    callbacks: int = 0
    keys: tuple[bytes, ...] = ()
    channels: tuple[HostChannels, ...] = ()


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The client's answer to `Ask`, or the text that its callable raised, or the status if it gave no answer."""

    content: bytes = b""
    raised: str | None = None
    status: Status | None = None


ToCompiler = CompileProgram | Answer

# ---- compiler process -> worker


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The program was read. Errors name it, and the line of the user's code that it comes from; "" if unknown."""

    name: str
    line: str


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Ask the client: call its callable of `key` with these bytes. The next message to this process is an `Answer`."""

    key: bytes
    request: bytes


class CompiledProgram(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A program in a form that the worker loads. `executable` is empty, without a description, if it was only checked.

    `signatures` are those of the callables that it calls while it runs.
    """

    executable: bytes
    description: Description | None
    signatures: tuple[Signature, ...]


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The program cannot be compiled."""

    status: Status


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A compilation has ended. With `retires`, the process ends now: it takes no other program."""

    outcome: CompiledProgram | Rejected
    retires: bool


FromCompiler = Begun | Ask | Finished

# ---- worker -> fork server


class Fork(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Fork a compiler process under this number. Its link and its standard error come with the message."""

    number: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Kill the compiler process if it still runs."""

    number: int


ToServer = Fork | Kill

# ---- fork server -> worker


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The compiler process has ended."""

    number: int
    status: int  # of its exit, or the negative number of a signal
    most_bytes: int  # of memory that it had at a time


class CompilerOptions(msgspec.Struct, frozen=True):
    """How to start the fork server of a host's compilers.

    `compiler` names what a forked process runs, as "module:callable": see
    `devices.compilers.compiler_process.Compiler`. It is imported once, by the server. The limits are those of one
    process: `memory_bytes` of data, and `seconds` of CPU time per compilation. `control` is the server's descriptor.
    """

    compiler: str
    devices: int
    memory_bytes: int
    seconds: int
    control: int = -1
