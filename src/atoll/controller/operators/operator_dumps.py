"""The structs of what handles requests of operators. See `atoll.state.object_dumps`."""

from __future__ import annotations

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.slice_placement import IslandDevices
from atoll.controller.operators import drains
from atoll.controller.operators.drains import Drains, _Drain
from atoll.controller.operators.requests import Operators, _Start
from atoll.controller.operators.service import WaitingRequests
from atoll.protocol import messages as m
from atoll.state.object_dumps import Dump, Ref, callback, dump_of
from atoll.state.session import Session
from atoll.state.stepped_work import Bug
from atoll.state.stored_forms import DurationsOf, TurnsOf


@dump_of(_Drain, "drain", version=2)
class DrainDump(Dump):
    operator: int
    island: int
    left: set[int] = set()
    leaving: set[int] = set()
    returns: bool = False
    problems: list[str] = []
    copies_since: float = 0.0


@dump_of(Drains, "drains", version=2)
class DrainsDump(Dump):
    _end_times: DurationsOf[int]
    _leave_times: DurationsOf[int]
    _ending: dict[int, Ref[_Drain]] = {}
    _leaving: dict[int, Ref[_Drain]] = {}
    _copying: dict[int, Ref[_Drain]] = {}


callback("drains: moved", None, drains._moved, Ref[Session], IslandDevices, IslandDevices)
callback("drains: when moved", Drains, Drains._when_moved, Ref[_Drain], int)


@dump_of(Operators, "operators")
class OperatorsDump(Dump):
    _start_times: DurationsOf[int]
    _refused: str = ""
    _starting: dict[int, _Start] = {}


callback(
    "operators: remapped",
    Operators,
    Operators._remapped,
    Ref[Session],
    m.RemapRequest,
    tuple[DeviceLocation, ...],
)
callback("operators: when remapped", Operators, Operators._when_remapped, int, Ref[Session], m.RemapRequest)
callback("operators: when suspended", Operators, Operators._when_suspended, int, Ref[Session])
callback("operators: when resumed", Operators, Operators._when_resumed, int, Ref[Session])


@dump_of(WaitingRequests, "waiting requests", version=2)
class WaitingRequestsDump(Dump):
    _turns: TurnsOf[m.FromOperator]
    failed: dict[int, Bug] = {}
