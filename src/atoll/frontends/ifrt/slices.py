"""Slices: to JAX, executables that are never run. A slice lives until its executable is destructed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.cluster.slices import MAGIC, SliceInfo, read_request
from atoll.errors import OK, StatusError, invalid
from atoll.frontends.ifrt.arrays import ArrayRecord
from atoll.frontends.ifrt.executables import Loaded
from atoll.frontends.ifrt.session import Exchange
from atoll.frontends.session.link import Link
from atoll.ir.program import Program
from atoll.protocol import messages as m
from atoll.protocol.ifrt import executables_pb2


class SliceExecutable(Loaded):
    """Stands for a slice: its devices are those of the slice, and its fingerprint tells the rest."""

    def __init__(self, added: m.SliceAdded, island: int) -> None:
        super().__init__()
        self.slice = added.slice
        self.name = f"slice {added.slice}"
        self.devices = added.devices
        self.fingerprint = msgspec.json.encode(SliceInfo(added.slice, added.shape, island))
        self.functions = ()
        self.outputs = ()
        self.donated = frozenset()

    def unloaded(self, link: Link) -> None:
        link.send(m.ReleaseSlice(self.slice))

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        raise _not_run()

    def program(self, preserved: frozenset[int], completion: bool) -> Program:
        raise _not_run()

    async def cost(self, link: Link, reply: Any) -> None:
        raise _not_run()

    async def text(self, link: Link) -> str:
        raise _not_run()

    def metadata_reply(self) -> Any:
        reply = executables_pb2.ExecutableMetadataReply()
        for each in (
            reply.parameter_layouts_list,
            reply.output_layouts_list,
            reply.output_shardings,
            reply.donated_input_indices,
            reply.compiled_memory_stats,
        ):
            each.SetInParent()
        reply.output_memory_kinds.memory_kind_lists.add()
        return reply

    def output_replies(self, handles: list[int]) -> list[Any]:
        return []


def _not_run() -> StatusError:
    return invalid("a slice is no program: it cannot be run")


def is_wish(payload: bytes) -> bool:
    """Whether a plugin program asks something of the resource manager."""
    return payload.startswith(MAGIC)


def add(exchange: Exchange, payload: bytes) -> None:
    """Answers with the executable of a new slice. Raises INVALID_ARGUMENT for what is no wish."""
    session = exchange.session
    slice_request = read_request(bytes(payload[len(MAGIC) :]))
    session.hold()

    async def work() -> Any:
        try:
            added = await session.link.add_slice(slice_request)
        finally:
            session.go_on()
        island = session.link.welcome.devices[added.devices[0]].island
        loaded = SliceExecutable(added, island)
        response = exchange.response()
        response.compile.CopyFrom(loaded.compile_reply(session.load(loaded), session.add_future(OK)))
        return response

    exchange.later(work(), placed=False)
