"""Messages between a worker, the fork server of its compilers, and a compiler process; and the link for them.

A message on the link is a length of 8 bytes, then msgpack. The worker trusts nothing that it receives: it bounds the
length, and msgspec checks the structure.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from atoll.decodable import decodable
from atoll.errors import FrameError, Status
from atoll.ir.outline import Outline
from atoll.ir.types import ShardType
from atoll.protocol.messages import FunctionInfo, HostChannels
from atoll.wire.framing import NO_MESSAGE

# Dimensions from major to minor; None for the platform's default.
Layout = tuple[int, ...] | None
# Sets of a program's devices that communicate. Device replica * partitions + partition has this number.
Parts = tuple[tuple[int, ...], ...]


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """The types of a callable: those that it returns, or writes to the buffers that it takes.

    With `channels`, XLA also needs the types of its `operands`.
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
    parts: Parts | None = None  # None if they were not found out: see `devices.xla.description`

    def crosses(self, places: Sequence[int]) -> bool:
        """Return whether devices at different places communicate, such as hosts. `places` are those of all devices."""
        return self.parts is None or any(len({places[device] for device in part}) > 1 for part in self.parts)


class RenamedTarget(msgspec.Struct, frozen=True, array_like=True):
    """A program's custom call target of a client's library, and the name under which the worker has registered it."""

    name: str
    private_name: str
    is_batch_partitionable: bool = False


# ---- worker -> compiler process


class CompileProgram(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Compile a program for `replicas` x `partitions` devices of the worker's platform.

    While the program runs, it calls `callbacks` callables of its client. While it is compiled, XLA calls those of
    `keys`. If the process cannot compile for the platform, it only reads and checks the program. It renames the custom
    calls of `targets`, and has no handlers for them.

    `fragment` is as in `FunctionSource`.
    """

    program: bytes
    options: bytes
    replicas: int
    partitions: int
    platform: str
    callbacks: int = 0
    keys: tuple[bytes, ...] = ()
    channels: tuple[HostChannels, ...] = ()
    fragment: tuple[str, str] | None = None
    targets: tuple[RenamedTarget, ...] = ()


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The client's answer to `Ask`: content, the text of the error that its callable raised, or a failed status."""

    content: bytes = b""
    raised: str | None = None
    status: Status | None = None


ToCompiler = CompileProgram | Answer

# ---- compiler process -> worker


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """The process has read the program. Errors quote its name and its line in the user's code ("" if unknown).

    `too_large` are the bytes of a value within the program for which XLA's compiler may end the process, or 0.
    """

    name: str
    line: str
    too_large: int = 0


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Call the client's callable of `key` with these bytes. The next message to this process is an `Answer`."""

    key: bytes
    request: bytes


class CompiledProgram(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A program in a form that the worker loads.

    If the program was only checked, `executable` is empty and `description` is None. `signatures` are those of the
    callables that the program calls while it runs. `program` is the module of a fragment that was only checked.
    """

    executable: bytes
    description: Description | None
    signatures: tuple[Signature, ...]
    program: bytes = b""

    @property
    def has_parts(self) -> bool:
        """Return whether it is known which of its devices communicate."""
        return self.description is not None and self.description.parts is not None


class OutlinedProgram(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The outline of an IFRT IR program."""

    outline: Outline


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The program cannot be compiled."""

    status: Status


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A compilation has ended. If `retires` is set, the process exits and takes no other program."""

    outcome: CompiledProgram | OutlinedProgram | Rejected
    retires: bool


FromCompiler = Begun | Ask | Finished

# ---- worker -> fork server


class Fork(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Fork a compiler process under this number. The descriptors of its link and its standard error are attached."""

    number: int


class Kill(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Kill the compiler process if it is still running."""

    number: int


ToServer = Fork | Kill

# ---- fork server -> worker


class Forked(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The compiler process has started."""

    number: int
    pid: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The compiler process has ended, or could not be started because of `problem`."""

    number: int
    status: int  # exit status, or the negative number of a signal
    max_bytes: int  # peak memory
    problem: str = ""


FromServer = Forked | Ended


class CompilerOptions(msgspec.Struct, frozen=True):
    """How to start the fork server of a host's compilers.

    `compiler` names a factory of `devices.compilers.compiler_process.Compiler` as "module:callable". The server imports
    it once. Each process may have `memory_bytes` of data, and use `seconds` of CPU time per compilation. `control` is
    the descriptor of the server's socket.
    """

    compiler: str
    devices: int
    memory_bytes: int
    seconds: int
    control: int = -1


_LENGTH = struct.Struct("<Q")
_encode = msgspec.msgpack.Encoder().encode
# XLA's serialized executables are protobuf messages, which have 2 GiB at most.
MAX_BYTES = (1 << 31) + (1 << 20)

Incoming = TypeVar("Incoming")


class TimeLimit:
    """The seconds `left` for which one end of a connection may wait for the other.

    It counts in steps of at most `STEP_SECONDS`. So time for which this process is stopped, for example in a frozen
    container, hardly counts: the other end did not run then either, or what it sent was not read.
    """

    STEP_SECONDS = 1.0

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    @property
    def step(self) -> float:
        """Return for how long to wait before the next call of `count`."""
        return max(1e-3, min(self.left, self.STEP_SECONDS))

    def count(self, seconds: float) -> None:
        """Count a wait that was to take at most one step."""
        self.left -= min(seconds, self.step)


class CompilerLink(Generic[Incoming]):
    """One end of a connection. One thread at a time may send, and one may receive."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(decodable(incoming))

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError if the peer has ended."""
        body = _encode(message)
        self._socket.settimeout(None)
        self._socket.sendall(_LENGTH.pack(len(body)))
        self._socket.sendall(body)

    def receive(self, limit: TimeLimit | None = None) -> Incoming:
        """Return the next message.

        Raises EOFError if the peer has ended, TimeoutError if no time is left, and FrameError for invalid bytes.
        """
        length: int = _LENGTH.unpack(self._read(_LENGTH.size, limit))[0]
        if length > MAX_BYTES:
            raise FrameError(f"a message of {length} bytes is over the limit of {MAX_BYTES}")
        try:
            return self._decoder.decode(self._read(length, limit))
        except NO_MESSAGE as error:
            raise FrameError(f"not a message: {error}") from None

    def _read(self, count: int, limit: TimeLimit | None) -> bytearray:
        content = bytearray(count)
        view = memoryview(content)
        while view:
            self._socket.settimeout(None if limit is None else limit.step)
            began, got = time.monotonic(), -1
            try:
                got = self._socket.recv_into(view)
            except ConnectionError:
                got = 0
            except TimeoutError:
                pass
            if not got:
                raise EOFError
            view = view[max(got, 0) :]
            if limit is not None:
                limit.count(time.monotonic() - began)
                if view and limit.left <= 0:
                    raise TimeoutError
        return content

    def close(self) -> None:
        self._socket.close()
