"""Programs of null devices: a duration, and the types of parameters and outputs."""

from __future__ import annotations

import msgspec

from atoll.decodable import decodable
from atoll.errors import invalid, unimplemented
from atoll.ir.types import DTYPE_BITS, ShardType
from atoll.protocol.messages import FunctionSource

_MAGIC = b"atoll null program\n"


class NullProgram(msgspec.Struct, frozen=True):
    """A function. All devices for which it is compiled run it together, for `seconds`."""

    name: str
    seconds: float
    parameters: tuple[ShardType, ...]
    outputs: tuple[ShardType, ...]
    donated: tuple[int, ...] = ()
    scratch_bytes: int = 0

    def source(self) -> bytes:
        """Return the program in the form that a client sends for compilation."""
        return msgspec.msgpack.encode(FunctionSource(_MAGIC + msgspec.msgpack.encode(self), b""))


def read_program(data: bytes) -> NullProgram:
    """Parse a program. Raises INVALID_ARGUMENT if it is invalid, and UNIMPLEMENTED if it is for other devices."""
    if not data.startswith(_MAGIC):
        raise unimplemented("null devices run only null programs: the duration of an XLA program is not known")
    try:
        program = msgspec.msgpack.decode(data[len(_MAGIC) :], type=decodable(NullProgram))
    except msgspec.MsgspecError as error:
        raise invalid(f"invalid null program: {error}") from None
    _check(program)
    return program


def _check(program: NullProgram) -> None:
    problem = ""
    if not 0 <= program.seconds <= 1e6:
        problem = f"invalid duration {program.seconds} s"
    elif any(not 0 <= position < len(program.parameters) for position in program.donated):
        problem = f"it donates {program.donated}, and has {len(program.parameters)} parameters"
    else:
        for dtype, shape in (*program.parameters, *program.outputs):
            if dtype not in DTYPE_BITS or min(shape, default=0) < 0:
                problem = f"invalid type {dtype}{list(shape)}"
    if problem:
        raise invalid(f"null program {program.name!r}: {problem}")
