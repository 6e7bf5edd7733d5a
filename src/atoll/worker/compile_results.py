"""How compilations end, and the reports about that."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from atoll.devices.compilers.compiler_messages import OutlinedProgram
from atoll.devices.device import LoadedFunction
from atoll.errors import OK, Code, Status, StatusError
from atoll.ir.types import DTYPE_BITS
from atoll.protocol.messages import Compiled, FunctionInfo
from atoll.worker.function_records import Function

# The report about an IFRT IR program, which the controller forwards.
MAX_OUTLINE_BYTES = 4 << 20
# The report about a function, which is sent in one frame (`wire.framing`), and its name in there for operators.
MAX_INFO_BYTES = 32 << 20
MAX_TITLE = 1024
# Memory of a function on each device.
MAX_BYTES = 1 << 61


class CompileResult(msgspec.Struct, frozen=True):
    """The end of a compilation: a function, an outline, a loaded library, or an error."""

    status: Status = OK
    function: Function | None = None
    info: FunctionInfo | None = None
    seconds: float = 0.0
    cached: bool = False
    crashed: bool = False

    def failed(self, status: Status) -> CompileResult:
        """Return the result for a function that cannot be used for this reason."""
        return replace(self, status=status, function=None, info=None)

    def checked(self) -> tuple[CompileResult, bytes]:
        """Return the result with its encoded `info`.

        The result has failed if no device can run the function, or `info` is too large for the report.
        """
        encoded = b"" if self.info is None else msgspec.msgpack.encode(self.info)
        if self.function is None or self.info is None:
            return self, encoded
        problem = _size_problem(self.function.loaded, self.info) or _report_problem(self.info, len(encoded))
        return (self, encoded) if problem is None else (self.failed(problem), b"")


def compiled(name: str, result: CompileResult, info: bytes = b"", title: str = "") -> Compiled:
    """Return the report about a compilation. `info` is encoded, and `title` is the name that the client chose."""
    function = result.function
    return Compiled(
        name,
        result.status,
        info,
        result.seconds,
        result.cached,
        0 if function is None else function.loaded.scratch_bytes,
        function is not None and bool(function.callbacks),
        title[:MAX_TITLE],
        result.crashed,
        function is not None and function.is_apart,
    )


def _size_problem(loaded: LoadedFunction, info: FunctionInfo) -> Status | None:
    """Return why no device can run the function, or None. A compiler process can report any numbers.

    The controller would take larger numbers for a violation, and end this worker.
    """
    largest = max((math.prod(each.shape) * DTYPE_BITS.get(each.dtype, 0) // 8 for each in info.outputs), default=0)
    if 0 <= loaded.scratch_bytes < MAX_BYTES and largest < MAX_BYTES:
        return None
    # XLA's sums are signed, so larger ones can be negative.
    found = f"{loaded.scratch_bytes} bytes while it runs, and {largest} bytes for its largest output"
    text = f"out of memory: {info.name[:200]} needs {found} on each device: at most {MAX_BYTES - 1} are possible"
    return Status(int(Code.RESOURCE_EXHAUSTED), text)


def _report_problem(info: FunctionInfo, size: int) -> Status | None:
    """Return why the report cannot be sent, or None. The connection to the controller would end at a larger frame."""
    if size <= MAX_INFO_BYTES:
        return None
    return Status(
        int(Code.RESOURCE_EXHAUSTED),
        f"the description of {info.name[:200]} has {size:,} bytes: at most {MAX_INFO_BYTES:,} are allowed. Give the "
        "program a shorter name, or fewer parameters and outputs",
    )


def outlined(program: OutlinedProgram) -> FunctionInfo:
    """Return the report about an IFRT IR program, of which a compiler process has read the outline.

    Raise RESOURCE_EXHAUSTED if it is too large.
    """
    name = program.outline.program.name
    info = FunctionInfo(name, b"", None, (), (), (), {}, 0, outline=program.outline)
    size = len(msgspec.msgpack.encode(info))
    if size > MAX_OUTLINE_BYTES:
        text = f"the program {name[:200]!r} has an outline of {size:,} bytes: at most {MAX_OUTLINE_BYTES:,} are allowed"
        raise StatusError(Code.RESOURCE_EXHAUSTED, text)
    return info
