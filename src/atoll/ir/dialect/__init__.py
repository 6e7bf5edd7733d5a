"""The MLIR dialect `atoll`, in xDSL: programs from what the client asked to what hosts exchange.

Nothing that a user's process or a worker imports comes here, and nothing on the way of a launch.
"""

from __future__ import annotations

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.ir import Dialect
from xdsl.parser import Parser

from atoll.ir.dialect.attributes import DeviceLocations, HostBuffers, Mappings, Numbers, Strides
from atoll.ir.dialect.dialect_types import ArrayType, CompletionType, PlacedCompletionType, PlacedType
from atoll.ir.dialect.moves import MoveOp, ReceiveOp, SendOp
from atoll.ir.dialect.ops import CallOp, GetOp, ProgramOp, PutOp, RearrangeOp, ReportOp, ReturnOp, TransferOp
from atoll.ir.dialect.rows import ReceiveRowsOp, RouteOp, SendRowsOp, UnrouteOp

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
    """A context that knows the dialect."""
    known = Context()
    known.load_dialect(Builtin)
    known.load_dialect(Atoll)
    return known


def parse(text: str) -> ModuleOp:
    """The module that a text describes. Raises `xdsl.utils.exceptions.ParseError`."""
    module = Parser(context(), text).parse_module()
    module.verify()
    return module
