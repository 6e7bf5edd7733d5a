"""The structs of what handles islands and their hosts. See `atoll.state.object_dumps`."""

from __future__ import annotations

from typing import Annotated

from atoll.controller.islands.engine_requests import Agents
from atoll.controller.islands.engine_role import EngineRole
from atoll.controller.islands.island_recovery import IslandRecovery, _AtLoss
from atoll.controller.islands.overruns import Overruns, _Closed
from atoll.controller.islands.relay_groups import Relays
from atoll.controller.islands.waiting_calls import WaitingCalls
from atoll.protocol import messages as m
from atoll.state.object_dumps import As, Dump, Ref, dump_of
from atoll.state.offenses import Running
from atoll.state.stored_forms import DurationsOf, Key
from atoll.state.tenants import Tenant


@dump_of(EngineRole, "engine role")
class EngineRoleDump(Dump):
    _lost_at: float | None = None


@dump_of(Agents, "agents")
class AgentsDump(Dump):
    report: m.EngineReport
    _agents: set[int] = set()


@dump_of(Relays, "relays")
class RelaysDump(Dump):
    broken: dict[int, str] = {}
    _islands: set[int] = set()


RunningForm = Annotated[tuple[Ref[Tenant], bool], As(Running, True)]
AtLossForm = Annotated[tuple[dict[str, RunningForm], dict[str, int]], As(_AtLoss, True)]


@dump_of(IslandRecovery, "recovery", version=4)
class IslandRecoveryDump(Dump):
    _broken_for: DurationsOf[int]
    _hanging: DurationsOf[int]
    _restarting: DurationsOf[int]
    _divided: dict[tuple[str, str], float] = {}
    _silent_pairs: dict[Key, float] = {}
    _at_loss: dict[int, AtLossForm] = {}
    _charged: set[int] = set()


@dump_of(Overruns, "overruns")
class OverrunsDump(Dump):
    _abandoned: DurationsOf[int]
    _busy: dict[int, m.Pong] = {}
    _running: dict[int, float] = {}
    _stopped: dict[int, tuple[float, str]] = {}
    _closed: dict[int, _Closed] = {}


@dump_of(WaitingCalls, "waiting calls")
class WaitingCallsDump(Dump):
    _waiting: DurationsOf[int]
    _ended: set[int] = set()
