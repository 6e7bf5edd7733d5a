"""Records from which traces are made: what ran on each host, when, and for what it waited.

Hosts and proxies have their own clocks. The controller measures their offsets (`telemetry.clocks`). Unless stated
otherwise, times are in nanoseconds of the trace's clock (`telemetry.trace`), which is that of the controller.
"""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The execution of a gang on one host. Not garbage-collected, because there is one for each gang and host.

    The session launched the gang at `launched`. It waited in the controller for the reasons in `waits`, in order, and
    was then dispatched, and enqueued on the host's devices at `enqueued`. It ran from `started`, when its devices were
    free for it, to `ended`.
    """

    island: int
    host: int
    session: int
    program: str
    kind: str  # call, put, get, move, send, receive, rearrange, send rows or receive rows
    sequence: int
    started: int
    ended: int
    nodes: int = 1  # number of nodes of the program that were dispatched together as this gang
    devices: tuple[int, ...] = ()  # ordinals of the devices that it kept busy
    enqueued: int = 0
    launched: int = 0
    waits: tuple[tuple[str, int], ...] = ()  # (reason, nanoseconds)
    nbytes: int = 0  # bytes that the gang moves on all of its hosts; for rows, on this host
    node: int = 0  # the same for gangs of one node on several islands
    function: str = ""  # JAX's name, such as `jit_step`, or for several nodes `jit_a, jit_b x3`

    @property
    def dispatched(self) -> int:
        """The time at which the controller dispatched the gang."""
        return self.launched + sum(nanoseconds for _, nanoseconds in self.waits)


class ClientCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request of a client to its proxy, or a time during which the proxy held the client back.

    Times are those of the proxy's clock.
    """

    kind: str  # that of the request; "window": the launch window was full; "quiesced": the session's devices moved
    name: str  # of the program that runs
    received: int
    handled: int  # time at which its messages were sent to the cluster
    answered: int  # time of the answer to the client; 0 before
    nbytes: int = 0


class SessionCalls(msgspec.Struct, frozen=True, array_like=True):
    """The calls that a proxy has recorded. `calls` is msgpack of a list of `ClientCall`.

    `offsets` are (time of the proxy's clock, offset); adding the offset to a time of the proxy's clock gives the
    controller's time, with an error of at most `error`. Between two entries, the offset is interpolated linearly.
    `error` is -1 if nothing was measured.
    """

    session: int
    calls: bytes
    offsets: tuple[tuple[int, int], ...] = ()
    error: int = -1


class ClockError(msgspec.Struct, frozen=True, array_like=True):
    """The error of a host's times, in nanoseconds. The host's clock is `offset` behind the controller's.

    `error` is -1 if nothing was measured yet. `samples` is the number of measured round trips.
    """

    host: int
    offset: int
    error: int
    samples: int


class SessionName(msgspec.Struct, frozen=True, array_like=True):
    """A session with its name for users."""

    number: int
    label: str
    tenant: str


class TraceRecord(msgspec.Struct, frozen=True, array_like=True):
    """The records of a cluster and the errors of its clocks. `missing` describes records that are unavailable."""

    spans: list[Span] = []
    clocks: tuple[ClockError, ...] = ()
    sessions: tuple[SessionName, ...] = ()
    calls: tuple[SessionCalls, ...] = ()
    missing: tuple[str, ...] = ()
