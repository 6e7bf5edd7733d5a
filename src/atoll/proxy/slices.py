"""Slices: to JAX, executables that are never run. A slice lives until its executable is destructed."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import OK, invalid
from atoll.ir.program import Program
from atoll.proxy.executables import PLUGIN_PROGRAM, Executable
from atoll.proxy.session import Exchange
from atoll.transport import messages as m
from atoll.transport.messages import FunctionInfo
from atoll.transport.slices import MAGIC, SliceTold, read_wish

_PREFIX = b"__serialized_plugin_program "


class SliceExecutable(Executable):
    """Stands for a slice: its devices are those of the slice, and its fingerprint tells the rest."""

    def __init__(self, added: m.SliceAdded, island: int) -> None:
        told = SliceTold(added.slice, added.shape, island)
        info = FunctionInfo(f"slice {added.slice}", msgspec.json.encode(told), None, (), (), (), {}, 0)
        super().__init__(-1, info, added.devices)
        self.slice = added.slice

    def program(self, preserved: frozenset[int], completion: bool) -> Program:
        raise invalid("a slice is no program: it cannot be run")


def payload_of(request: Any) -> bytes | None:
    """What a compile request asks of the resource manager; None where it is about something else."""
    program = request.program
    if program.type_name != PLUGIN_PROGRAM:
        return None
    data = program.data.removeprefix(_PREFIX)
    return bytes(data[len(MAGIC) :]) if data.startswith(MAGIC) else None


def add(exchange: Exchange, payload: bytes) -> None:
    """Answers with the executable of a new slice. Raises INVALID_ARGUMENT for what is no wish."""
    session = exchange.session
    wish = read_wish(payload)
    session.hold()

    async def work() -> Any:
        try:
            added = await session.link.add_slice(wish)
        finally:
            session.go_on()
        island = session.link.welcome.devices[added.devices[0]].island
        handle = session.mint()
        executable = session.executables[handle] = SliceExecutable(added, island)
        response = exchange.response()
        response.compile.CopyFrom(executable.compile_reply(handle, session.add_future(OK)))
        return response

    exchange.later(work(), placed=False)
