"""Compiled functions: which sessions use which, and the name that workers know it by.

A name is made of the program's and options' hash, of the devices and the tenant, so the same program is compiled once
an island, whichever session of a tenant sends it. The controller never looks inside; workers check the hash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.cluster.locations import DeviceLocation, HostDevice, MemoryRequirement, Placement
from atoll.errors import Status, StatusError, invalid
from atoll.ir.program import Call, Program
from atoll.ir.steps import Steps
from atoll.ir.types import DTYPE_BITS, ArraySpec, Even, Opaque, Replicated, ShardType, Uneven, shard_boxes

# XLA's device assignment: [replica][partition].
DeviceAssignment = tuple[tuple[DeviceLocation, ...], ...]


_POINTER = 8  # bytes that XLA allocates for each of several outputs


@dataclass(frozen=True, slots=True)
class FunctionReport:
    """A compiled function, as its workers report it. `devices` are those that it runs on.

    `outputs` has the dtype and the shape of a shard of each output, and `nbytes` the size of that shard. `outputs` is
    None for Python functions: workers check the results of these against the program. `donated` has the positions of
    the parameters whose memory the function writes its outputs to.
    """

    devices: tuple[HostDevice, ...] = ()
    title: str = ""  # by which people know it
    scratch_bytes: int = 0  # on each device while it runs
    calls_client: bool = False  # while it runs
    outputs: tuple[ShardType, ...] | None = None
    nbytes: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()

    @property
    def scratch(self) -> MemoryRequirement:
        """The memory that the function needs on its devices while it runs."""
        return self._on_each(self.scratch_bytes) if self.scratch_bytes else ()

    def output(self, position: int) -> MemoryRequirement:
        """The memory that an output takes."""
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
            raise invalid(f"{name} has {len(self.outputs)} outputs, not {len(call.outputs)}")
        for position, ((dtype, shape), spec) in enumerate(zip(self.outputs, call.outputs, strict=True)):
            if spec.dtype != dtype or not _has_shards(spec, shape):
                declared = f"{spec.dtype}{list(spec.shape)}"
                raise invalid(f"output {position} of {name} has shards of {dtype}{list(shape)}, not of {declared}")
            if _places(spec.sharding.devices, placement) != own:
                raise invalid(f"output {position} of {name} is on other devices than those of the call")
        for position in (*call.donated, *call.preserved):
            if position not in self.donated:
                raise invalid(f"{name} does not consume its input {position}, which the call donates")


@dataclass
class Registration:
    """One session's request for a function: answered when all its hosts have compiled, or one has failed."""

    session: int
    function: int
    name: str
    pending: set[int]
    failure: Status | None = None
    info: bytes = b""


@dataclass
class FunctionRegistry:
    """Names, and how many sessions and programs refer to each."""

    users: dict[str, int] = field(default_factory=dict)
    locations: dict[str, DeviceAssignment] = field(default_factory=dict)  # where each of them runs
    contents: dict[str, str] = field(default_factory=dict)  # the hashes of what their clients sent
    reports: dict[str, FunctionReport] = field(default_factory=dict)  # of those that have been compiled
    # Compilations under way, in the order in which each host was asked: its answers come in any order.
    waiting: dict[tuple[str, int], list[Registration]] = field(default_factory=dict)
    compiled: int = 0
    cached: int = 0
    seconds: float = 0.0

    def acquire(self, name: str) -> None:
        self.users[name] = self.users.get(name, 0) + 1

    def release(self, name: str) -> bool:
        """Drops a reference; True where it was the last."""
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
        for host in registration.pending:
            self.waiting.setdefault((registration.name, host), []).append(registration)

    def settle(self, name: str, host: int, status: Status, info: bytes) -> list[Registration]:
        """A host has compiled the function, or failed to. Returns the registrations that this completes."""
        done = []
        for registration in self.waiting.pop((name, host), []):
            registration.pending.discard(host)
            if not status.ok and registration.failure is None:
                registration.failure = status
            registration.info = registration.info or info
            if not registration.pending:
                done.append(registration)
        return done

    def abandon(self, name: str, hosts: Iterable[int]) -> list[Registration]:
        """None of these hosts answers for the function any more. Returns the registrations that waited."""
        abandoned: dict[int, Registration] = {}
        for host in hosts:
            abandoned.update({id(each): each for each in self.waiting.pop((name, host), ())})
        return list(abandoned.values())


def hosts_of(locations: DeviceAssignment) -> set[int]:
    return {location.host for partitions in locations for location in partitions}


def function_name(content: str, locations: DeviceAssignment, tenant: str = "") -> str:
    """The workers' name for a tenant's function on these physical devices: tenants share none, nor its fate."""
    places = [[(location.host, location.ordinal) for location in partitions] for partitions in locations]
    return hashlib.sha256(f"{content} {places} {tenant}".encode()).hexdigest()[:32]


def check_calls(
    program: Program, placement: Placement, functions: Mapping[int, str], reports: Mapping[str, FunctionReport]
) -> Steps[None]:
    """Check all calls of a program against the reports of their functions. Raises INVALID_ARGUMENT."""
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
    """Return the bytes of a shard of each output.

    `allocated` is what the compiler allocates for all outputs on a device, or 0 if that is not known. If this exceeds
    the size of the elements, it includes the padding of layouts: each output gets its share.
    """
    sizes = [math.prod(shape) * DTYPE_BITS.get(dtype, 0) // 8 for dtype, shape in outputs]
    together, allocated = sum(sizes), allocated - _POINTER * len(outputs)
    if not 0 < together < allocated:
        return tuple(sizes)
    return tuple(-(-size * allocated // together) for size in sizes)


def _places(devices: Sequence[int], placement: Placement) -> set[HostDevice]:
    return {(location.host, location.ordinal) for location in map(placement.__getitem__, devices)}


def _has_shards(spec: ArraySpec, shape: tuple[int, ...]) -> bool:
    """Whether each shard of the array has this shape, as far as the array's type tells."""
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
