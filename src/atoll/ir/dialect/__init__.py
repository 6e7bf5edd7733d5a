"""The MLIR dialect `atoll` in xDSL, for programs between their wire form and plans.

Only lowering and text forms use it: users' processes and workers do not import it, and launches do not run it.
"""

from __future__ import annotations

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.ir import Dialect
from xdsl.parser import Parser

from atoll.ir.dialect.attributes import (
    ArrayType,
    CompletionType,
    DeviceLocations,
    HostBuffers,
    Mappings,
    Numbers,
    PlacedCompletionType,
    PlacedType,
    Strides,
)
from atoll.ir.dialect.ops import (
    CallOp,
    GetOp,
    MoveOp,
    ProgramOp,
    PutOp,
    RearrangeOp,
    ReceiveOp,
    ReceiveRowsOp,
    ReportOp,
    ReturnOp,
    RouteOp,
    SendOp,
    SendRowsOp,
    TransferOp,
    UnrouteOp,
)

Atoll = Dialect(
    "atoll",
    [
        ProgramOp,
        ReturnOp,
        CallOp,
        TransferOp,
        PutOp,
        GetOp,
        RearrangeOp,
        ReportOp,
        MoveOp,
        SendOp,
        ReceiveOp,
        RouteOp,
        UnrouteOp,
        SendRowsOp,
        ReceiveRowsOp,
    ],
    [
        ArrayType,
        PlacedType,
        CompletionType,
        PlacedCompletionType,
        Numbers,
        Strides,
        DeviceLocations,
        HostBuffers,
        Mappings,
    ],
)


def context() -> Context:
    """Return a context with the dialect."""
    loaded = Context()
    loaded.load_dialect(Builtin)
    loaded.load_dialect(Atoll)
    return loaded


def parse(text: str) -> ModuleOp:
    """Parse a module. Raises `xdsl.utils.exceptions.ParseError`."""
    module = Parser(context(), text).parse_module()
    module.verify()
    return module
