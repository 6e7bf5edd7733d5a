"""What ran on a host, when, and why not before: the record of which traces are made.

Hosts and proxies have clocks of their own. The controller measures how far they are from its own (`telemetry.clocks`),
and gives all times by that: nanoseconds of its monotonic clock.
"""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A gang's time on one host: from `started`, when its devices there were free for it, to `ended`.

    `kind` is what the gang does: call, put, get, move, send, receive, rearrange, send rows or receive rows. `nodes` is
    how many nodes of the program were dispatched together as this gang. `devices` are the ordinals of those that it
    kept busy. `nbytes` are those that the gang moves, on all of its hosts together; of rows, those that this host
    moves. Gangs of one node on several islands have the same `node`. `function` is what it computes, by the name that
    JAX gives it, such as `jit_step`, or for several nodes `jit_a, jit_b x3`.

    It was `launched` by its session, waited in the controller for the reasons of `waits`, one after another, each with
    its nanoseconds, was dispatched when these were over, and `enqueued` on the host's devices.

    Without garbage collection, since one is made for each gang and host.
    """

    island: int
    host: int
    session: int
    program: str
    kind: str
    sequence: int
    started: int
    ended: int
    nodes: int = 1
    devices: tuple[int, ...] = ()
    enqueued: int = 0
    launched: int = 0
    waits: tuple[tuple[str, int], ...] = ()
    nbytes: int = 0
    node: int = 0
    function: str = ""

    @property
    def dispatched(self) -> int:
        """When the controller started it."""
        return self.launched + sum(nanoseconds for _, nanoseconds in self.waits)


class ClientCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that a client asked of its proxy, or that the proxy held it back.

    `received` is when the proxy took it, `handled` when what it does was sent to the cluster, `answered` when the
    client had its answer; 0 where it has none yet. `kind` is that of the request, "window" while the session's launch
    window was full, "quiesced" while its devices moved. `name` is the program that runs.
    """

    kind: str
    name: str
    received: int
    handled: int
    answered: int
    nbytes: int = 0


class SessionCalls(msgspec.Struct, frozen=True, array_like=True):
    """What a proxy has recorded: `calls` is msgpack of a list of `ClientCall`, by the proxy's clock.

    `offsets` are what is to be added to times of that clock for times of the controller's, to within `error`: each from
    a time of the proxy's clock on, and in between as they change evenly; error is -1 where nothing was measured.
    """

    session: int
    calls: bytes
    offsets: tuple[tuple[int, int], ...] = ()
    error: int = -1


class ClockError(msgspec.Struct, frozen=True, array_like=True):
    """How far times of a host may be off, in nanoseconds: its clock is `offset` behind the controller's.

    `error` is -1 where nothing was measured yet. `samples` are the round trips that were measured.
    """

    host: int
    offset: int
    error: int
    samples: int


class SessionName(msgspec.Struct, frozen=True, array_like=True):
    """A session, for people."""

    number: int
    label: str
    tenant: str


class TraceRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a cluster has recorded, and how well its clocks are known. `missing` says what could not be had."""

    spans: list[Span] = []
    clocks: tuple[ClockError, ...] = ()
    sessions: tuple[SessionName, ...] = ()
    calls: tuple[SessionCalls, ...] = ()
    missing: tuple[str, ...] = ()
