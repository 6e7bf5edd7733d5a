"""What ran on a host, and when: the record of which traces are made."""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A gang's time on one host.

    `started` and `ended` are nanoseconds of that host's monotonic clock. `kind` is what the gang does: call, put, get,
    move, send, receive or rearrange. `nodes` is how many nodes of the program were dispatched together as this gang.
    `devices` are the ordinals of those that it kept busy. Without garbage collection, since one is made for each gang
    and host.
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
