"""Compiled functions: their names on workers, their users, and the reports of workers about them.

A name is a hash of the program and its options, of the devices, and of the tenant. So a function that several sessions
of a tenant send is compiled once per island. The controller never decodes a function; workers check the hash.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from atoll.cluster.locations import DeviceLocation, HostDevice, MemoryRequirement, Placement
from atoll.errors import Status, StatusError, invalid
from atoll.ir.program import Call, Program
from atoll.ir.steps import Steps
from atoll.ir.types import DTYPE_BITS, ArraySpec, Even, Opaque, Replicated, ShardType, Uneven, shard_boxes
from atoll.quantities import counted

# XLA's device assignment: [replica][partition].
DeviceAssignment = tuple[tuple[DeviceLocation, ...], ...]

_POINTER = 8  # bytes that XLA allocates per output in addition to the output


class FunctionReport(msgspec.Struct, frozen=True):
    """A compiled function, as its workers report it."""

    devices: tuple[HostDevice, ...] = ()  # that it runs on
    title: str = ""  # name for display
    scratch_bytes: int = 0  # on each device while it runs
    calls_client: bool = False  # it calls the client's Python while it runs
    # Dtype and shape of a shard, per output. None for Python functions, whose results workers check.
    outputs: tuple[ShardType, ...] | None = None
    nbytes: tuple[int, ...] = ()  # size of a shard, per output
    donated: frozenset[int] = frozenset()  # positions of the parameters whose memory the outputs may take
    is_apart: bool = False  # it runs on several islands, each by itself

    @property
    def scratch(self) -> MemoryRequirement:
        """Return the memory that the function needs on its devices while it runs."""
        return self._on_each(self.scratch_bytes) if self.scratch_bytes else ()

    def output(self, position: int) -> MemoryRequirement:
        """Return the memory that an output takes."""
        return self._on_each(self.nbytes[position])

    def _on_each(self, nbytes: int) -> MemoryRequirement:
        return tuple((device, nbytes) for device in self.devices)

    def check(self, call: Call, placement: Placement) -> None:
        """Raise INVALID_ARGUMENT if a call contradicts the report."""
        name = f"the function {self.title}" if self.title else "the function"
        own = set(self.devices)
        if _places(call.devices, placement) != own:
            raise invalid(f"{name} runs on other devices than those of the call")
        if call.stream is not None or self.outputs is None:
            return
        if len(call.outputs) != len(self.outputs):
            raise invalid(f"{name} has {counted(len(self.outputs), 'output')}, not {len(call.outputs)}")
        for position, ((dtype, shape), spec) in enumerate(zip(self.outputs, call.outputs, strict=True)):
            if spec.dtype != dtype or not _has_shards(spec, shape):
                declared = f"{spec.dtype}{list(spec.shape)}"
                raise invalid(f"output {position} of {name} has shards of {dtype}{list(shape)}, not of {declared}")
            if _places(spec.sharding.devices, placement) != own:
                raise invalid(f"output {position} of {name} is on other devices than those of the call")
        for position in (*call.donated, *call.preserved):
            if position not in self.donated:
                raise invalid(f"{name} does not consume its input {position}, which the call donates")


class Registration(msgspec.Struct):
    """One session's request for a function. It is answered when all of its hosts have compiled or failed."""

    session: int
    function: int
    name: str
    pending: set[int]  # hosts
    failure: Status | None = None  # the first one
    info: bytes = b""
    is_repeated: bool = False  # the session had the function before


class FunctionRegistry(msgspec.Struct):
    """The functions of all sessions, by name, with counts of compilations."""

    users: dict[str, int] = msgspec.field(default_factory=dict)  # number of sessions and programs that use the function
    locations: dict[str, DeviceAssignment] = msgspec.field(default_factory=dict)
    contents: dict[str, str] = msgspec.field(default_factory=dict)  # hash of the source that the client sent
    reports: dict[str, FunctionReport] = msgspec.field(default_factory=dict)  # of compiled functions
    waiting: dict[tuple[str, int], list[Registration]] = msgspec.field(default_factory=dict)  # by name and host
    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0
    # How many hosts' answers the registrations of each session and function wait for, which is not stored.
    _pending: dict[int, Counter[int]] = msgspec.field(default_factory=dict)

    def count_pending(self) -> None:
        """Count the answers that registrations wait for, which is not stored."""
        self._pending.clear()
        for registrations in self.waiting.values():
            for each in registrations:
                self._count(each, 1)

    def _count(self, registration: Registration, count: int) -> None:
        session = registration.session
        own = self._pending.setdefault(session, Counter())
        own[registration.function] += count
        if not own[registration.function]:
            del own[registration.function]
            if not own:
                del self._pending[session]

    def compiling(self, session: int) -> int:
        """Return the number of the session's functions that are being compiled."""
        return len(self._pending.get(session, ()))

    def _await(self, name: str, host: int, registration: Registration) -> None:
        self.waiting.setdefault((name, host), []).append(registration)
        self._count(registration, 1)

    def _take(self, name: str, host: int) -> list[Registration]:
        taken = self.waiting.pop((name, host), [])
        for each in taken:
            self._count(each, -1)
        return taken

    def forget(self, session: int, name: str) -> None:
        """Forget the registrations of the session for the function."""
        for host in hosts_of(self.locations.get(name, ())):
            waiting = self.waiting.get((name, host), [])
            for each in waiting:
                if each.session == session:
                    self._count(each, -1)
            waiting[:] = [each for each in waiting if each.session != session]
            if not waiting:
                self.waiting.pop((name, host), None)

    def acquire(self, name: str) -> None:
        self.users[name] = self.users.get(name, 0) + 1

    def release(self, name: str) -> bool:
        """Drop a reference. Return whether it was the last one."""
        left = self.users.get(name, 0) - 1
        if left > 0:
            self.users[name] = left
            return False
        self.users.pop(name, None)
        self.locations.pop(name, None)
        self.contents.pop(name, None)
        self.reports.pop(name, None)
        return True

    def expect(self, registration: Registration) -> None:
        """Expect answers for the registration from all of its hosts.

        The session's former registrations of the same function end with this one. Failures of the former registrations
        do not count, because the hosts compile again.
        """
        hosts, key = registration.pending, (registration.session, registration.function)
        waiting = [each for host in hosts for each in self.waiting.get((registration.name, host), ())]
        former = {id(each): each for each in waiting if (each.session, each.function) == key}
        for each in former.values():
            each.failure = None
            for host in hosts - each.pending:
                self._await(each.name, host, each)
            each.pending |= hosts
        for host in hosts:
            self._await(registration.name, host, registration)

    def stop_waiting(self, registrations: Iterable[Registration]) -> None:
        """Expect no more answers for these registrations. Answers that still arrive have no effect."""
        ended = set(map(id, registrations))
        for key, waiting in list(self.waiting.items()):
            for each in waiting:
                if id(each) in ended:
                    self._count(each, -1)
            waiting[:] = [each for each in waiting if id(each) not in ended]
            if not waiting:
                del self.waiting[key]

    def settle(self, name: str, host: int, status: Status, info: bytes) -> list[Registration]:
        """Handle a host's answer to a request to compile. Return the registrations that this completes."""
        done = []
        for registration in self._take(name, host):
            registration.pending.discard(host)
            if not status.ok and registration.failure is None:
                registration.failure = status
            registration.info = registration.info or info
            if not registration.pending:
                done.append(registration)
        return done

    def abandon(self, name: str, hosts: Iterable[int]) -> list[Registration]:
        """Expect no more answers for the function from these hosts. Return the registrations that waited for them."""
        abandoned: dict[int, Registration] = {}
        for host in hosts:
            abandoned.update({id(each): each for each in self._take(name, host)})
        return list(abandoned.values())


def hosts_of(locations: DeviceAssignment) -> set[int]:
    return {location.host for partitions in locations for location in partitions}


def islands_of(locations: DeviceAssignment) -> tuple[int, ...]:
    return tuple(sorted({location.island for partitions in locations for location in partitions}))


def function_name(content: str, locations: DeviceAssignment, tenant: str = "") -> str:
    """Return the workers' name for a tenant's function on these devices.

    Tenants share no functions, so that a crash of one tenant's function does not block that of another.
    """
    places = [[(location.host, location.ordinal) for location in partitions] for partitions in locations]
    return hashlib.sha256(f"{content} {places} {tenant}".encode()).hexdigest()[:32]


def check_calls(
    program: Program, placement: Placement, functions: Mapping[int, str], reports: Mapping[str, FunctionReport]
) -> Steps[None]:
    """Raise INVALID_ARGUMENT if a call of the program contradicts the report of its function."""
    for number, node in enumerate(program.nodes):
        if isinstance(node, Call):
            try:
                report = reports.get(functions[node.function])
                if report is None:
                    raise invalid(f"function {node.function} is not compiled")
                report.check(node, placement)
            except StatusError as error:
                raise invalid(f"{program.name!r}: nodes[{number}]: {error.status.message}") from None
        yield


def output_sizes(outputs: Sequence[ShardType], allocated: int = 0) -> tuple[int, ...]:
    """Return the size of a shard of each output, in bytes.

    `allocated` is the memory that the compiler allocates on a device for all outputs, or 0 if it is unknown. If it
    exceeds the size of the elements, it includes the padding of layouts, which is distributed over the outputs.
    """
    sizes = [math.prod(shape) * DTYPE_BITS.get(dtype, 0) // 8 for dtype, shape in outputs]
    together, allocated = sum(sizes), allocated - _POINTER * len(outputs)
    if not 0 < together < allocated:
        return tuple(sizes)
    return tuple(-(-size * allocated // together) for size in sizes)


def _places(devices: Sequence[int], placement: Placement) -> set[HostDevice]:
    return {(location.host, location.ordinal) for location in map(placement.__getitem__, devices)}


def _has_shards(spec: ArraySpec, shape: tuple[int, ...]) -> bool:
    """Return whether each shard of the array has this shape. An opaque sharding matches every shape."""
    match spec.sharding.tiling:
        case Opaque():
            return True
        case Replicated():
            return spec.shape == shape
        case Even(shard_shape=each):
            return each == shape
        case Uneven(shard_shapes=shapes):
            return all(each == shape for each in shapes)
    boxes = shard_boxes(spec.sharding, spec.shape)
    return all(tuple([stop - start for start, stop in box]) == shape for box in boxes)
