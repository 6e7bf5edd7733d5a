"""A session as the controller keeps it: one client connection and all it owns."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.controller.directory import Directory
from atoll.controller.memory import Block
from atoll.controller.placement import SessionDevices
from atoll.controller.programs import GangTemplate, RegisteredProgram
from atoll.controller.scheduler import Ticket
from atoll.errors import Status
from atoll.ir.program import Program
from atoll.transport import messages as m


@dataclass(slots=True, eq=False)
class Launch:
    """One run of a program. `pending` counts the gangs that have not ended."""

    session: int
    program: RegisteredProgram
    results: tuple[int, ...]
    arguments: tuple[int, ...]
    feeds: tuple[int, ...]
    pending: int
    ticket: Ticket[Work]
    error: Status | None = None


@dataclass(slots=True, eq=False)
class Work:
    """What a gang does: one run a host. `handles` are the arguments and results, each once."""

    launch: Launch
    template: GangTemplate
    runs: tuple[tuple[int, m.Run], ...] = ()
    handles: tuple[int, ...] = ()
    hosts_left: set[int] = field(default_factory=set)
    started: bool = False
    failure: Status | None = None  # on some of several hosts
    duration: int = 0  # in nanoseconds, of the slowest host
    blocks: list[Block] = field(default_factory=list)  # that it holds while it runs


@dataclass
class Session:
    """One client connection and all it owns."""

    number: int
    pid: int
    label: str
    secret: str
    devices: SessionDevices
    directory: Directory = field(default_factory=Directory)
    programs: dict[int, RegisteredProgram | Status] = field(default_factory=dict)  # or why it cannot be lowered
    functions: dict[int, str] = field(default_factory=dict)
    # As they came, for when devices change places.
    bodies: dict[int, Program] = field(default_factory=dict)  # of programs
    wishes: dict[int, m.RegisterFunction] = field(default_factory=dict)  # for functions
    awaited_feeds: dict[tuple[int, int], Ticket[Work]] = field(default_factory=dict)  # (host, feed)
    early_feeds: set[tuple[int, int]] = field(default_factory=set)
    unwanted_feeds: set[tuple[int, int]] = field(default_factory=set)  # of launches that will not be
    cold: dict[int, set[str]] = field(default_factory=dict)  # by island: functions to be compiled again there
    # By island: what befell it, until the proxy knows that what it has sent there is lost.
    unseen: dict[int, Status] = field(default_factory=dict)
    in_flight: int = 0
    launches: int = 0
    has_errors: bool = False  # some buffer of it stands for an error
