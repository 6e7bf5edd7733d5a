"""What null devices run: how long it takes, and the types of what goes in and comes out."""

from __future__ import annotations

import msgspec

from atoll.errors import invalid, unimplemented
from atoll.ir.types import DTYPE_BITS, ShardType
from atoll.protocol.messages import FunctionSource

_MAGIC = b"atoll null program\n"


class NullProgram(msgspec.Struct, frozen=True):
    """A function over the devices that it is compiled for; they all take `seconds` for it, together."""

    name: str
    seconds: float
    parameters: tuple[ShardType, ...]
    outputs: tuple[ShardType, ...]
    donated: tuple[int, ...] = ()
    scratch_bytes: int = 0

    def source(self) -> bytes:
        """As a client sends it for compilation."""
        return msgspec.msgpack.encode(FunctionSource(_MAGIC + msgspec.msgpack.encode(self), b""))


def read_program(data: bytes) -> NullProgram:
    """Raises INVALID_ARGUMENT for what is no program; UNIMPLEMENTED for those of other devices."""
    if not data.startswith(_MAGIC):
        raise unimplemented("null devices run null programs only: they cannot tell how long XLA's would take")
    try:
        program = msgspec.msgpack.decode(data[len(_MAGIC) :], type=NullProgram)
    except msgspec.MsgspecError as error:
        raise invalid(f"no null program: {error}") from None
    _check(program)
    return program


def _check(program: NullProgram) -> None:
    problem = ""
    if not 0 <= program.seconds <= 1e6:
        problem = f"it takes {program.seconds} s"
    elif any(not 0 <= position < len(program.parameters) for position in program.donated):
        problem = "it donates what it does not take"
    else:
        for dtype, shape in (*program.parameters, *program.outputs):
            if dtype not in DTYPE_BITS or min(shape, default=0) < 0:
                problem = f"{dtype}{list(shape)} is no type"
    if problem:
        raise invalid(f"null program {program.name!r}: {problem}")
