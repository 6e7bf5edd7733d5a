"""Registered programs, which are lowered once and launched many times."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from atoll.cluster.locations import MemoryRequirement
from atoll.ir import plan as p
from atoll.ir.program import Call, Node, Program
from atoll.ir.types import ArraySpec
from atoll.ir.validation import DefinitionCheck
from atoll.state.delegated_parts import DelegatedProgram, NotDelegated
from atoll.state.dispatch_units import Unit, UnitBuilder
from atoll.state.gang_specs import GangSpec
from atoll.state.usage import Account


class HostPlan(msgspec.Struct, frozen=True):
    """A host's plan, with the positions of its arguments and results among the handles of the launch.

    Hosts with equal plans share one object. A large plan is encoded, as in the messages that contain it.
    """

    plan: p.Plan | msgspec.Raw
    arguments: tuple[int, ...]
    results: tuple[int, ...]


class ProgramValue(msgspec.Struct, frozen=True):
    """A value that a launch makes. `result` is its position among the results, or -1 if it is an inner value."""

    hosts: tuple[int, ...]
    nbytes: int
    result: int


class RegisteredProgram(msgspec.Struct):
    """A program cut into gangs. The handles of a launch are its arguments and results, in this order."""

    name: str
    number: int  # of its plans, on all hosts
    arguments: int  # number of arguments
    results: int  # number of results
    feeds: int  # number of feeds from the client
    host_feeds: int  # number of feeds between hosts
    nodes: tuple[Unit, ...]  # the gangs of each node
    plans: dict[int, HostPlan]  # by host
    values: tuple[ProgramValue, ...]  # without the arguments
    result_specs: tuple[ArraySpec | None, ...]  # None for a completion
    donated: frozenset[int]
    functions: tuple[str, ...]
    islands: tuple[int, ...]
    units: UnitBuilder  # of its launches
    is_unbounded: bool  # some of its gangs call host Python
    account: Account  # that its launches are charged to
    # Number of gangs that have not started, which need the plans even if the session has released the program.
    waiting: int = 0
    released: bool = False
    is_large: bool = False  # some of its plans are large, so all are sent in pieces
    reports: int = 0  # number of values that a launch reports
    fed: frozenset[int] = frozenset()  # islands to which the client sends bytes
    argument_memory: tuple[MemoryRequirement, ...] = ()  # per argument

    result_values: tuple[int, ...] = ()  # without the arguments
    inner_values: tuple[int, ...] = ()  # values between nodes, which are not results
    delegated: DelegatedProgram | NotDelegated = NotDelegated.UNKNOWN

    _by_plan: dict[tuple[int, ...], list[tuple[HostPlan, tuple[int, ...]]]] = msgspec.field(default_factory=dict)
    _by_handles: dict[tuple[int, ...], list[tuple[HostPlan, tuple[int, ...]]]] = msgspec.field(default_factory=dict)

    def by_plan(self, hosts: tuple[int, ...]) -> list[tuple[HostPlan, tuple[int, ...]]]:
        """Return the hosts, grouped by plan. Only neighbors in `hosts` share a group."""
        found = self._by_plan.get(hosts)
        if found is None:
            cut = [i for i, host in enumerate(hosts) if not i or self.plans[host] is not self.plans[hosts[i - 1]]]
            found = [
                (self.plans[hosts[first]], hosts[first:stop])
                for first, stop in zip(cut, [*cut[1:], len(hosts)], strict=False)
            ]
            self._by_plan[hosts] = found
        return found

    def by_handles(self, hosts: tuple[int, ...]) -> list[tuple[HostPlan, tuple[int, ...]]]:
        """Return the hosts, grouped by the arguments and results of their plans, with the first plan of each group."""
        found = self._by_handles.get(hosts)
        if found is None:
            groups: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[HostPlan, list[int]]] = {}
            for plan, some in self.by_plan(hosts):
                groups.setdefault((plan.arguments, plan.results), (plan, []))[1].extend(some)
            found = self._by_handles[hosts] = [(plan, tuple(some)) for plan, some in groups.values()]
        return found

    @property
    def large_parts(self) -> tuple[Collection[Any], ...]:
        """Return the parts that take long to free."""
        return self.nodes, self.values, self.result_specs

    @property
    def gangs(self) -> list[GangSpec]:
        return [gang for node in self.nodes for gang in node]

    @property
    def expected(self) -> int:
        """Return the expected duration of a launch in nanoseconds, or 0 if it is unknown."""
        if not any(gang.duration_estimate.runs for gang in self.gangs):
            return 0
        return sum(max(gang.duration_estimate.nanoseconds for gang in node) for node in self.nodes)


def device_groups(program: Program) -> Iterator[tuple[int, ...]]:
    """Yield the devices of each array and each call of a program."""
    for spec in program.arguments:
        yield spec.sharding.devices
    for node in program.nodes:
        for spec in node.outputs:
            yield spec.sharding.devices
        if isinstance(node, Call):
            yield node.devices


class ProgramParts(msgspec.Struct):
    """The parts of a definition that have arrived, if a client sends it in several messages."""

    name: str
    arguments: tuple[ArraySpec, ...]
    feeds: int
    check: DefinitionCheck  # of the parts
    nodes: list[Node] = msgspec.field(default_factory=list)
    called: dict[int, None] = msgspec.field(default_factory=dict)  # numbers of functions

    def checked(self, part: Program) -> DefinitionCheck:
        """Return the check after this part, without adding the part. Raise INVALID_ARGUMENT if the part is invalid."""
        check = copy.copy(self.check)
        for node in part.nodes:
            check.node(node)
        return check

    def add(self, part: Program) -> None:
        """Add a part that was checked."""
        self.check.count(part.nodes)
        self.nodes += part.nodes
        self.called.update(dict.fromkeys(calls_of(part)))

    def whole(self, last: Program) -> Program:
        """Return the program that this last part completes."""
        return Program(self.name, self.arguments, (*self.nodes, *last.nodes), last.results, self.feeds)


def calls_of(part: Program) -> list[int]:
    """Return the functions that the nodes of a program, or of a part of it, call."""
    return [node.function for node in part.nodes if isinstance(node, Call)]
