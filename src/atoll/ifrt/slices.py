"""Slices: to JAX, executables that are never run. A slice lives until its executable is destructed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.cluster.slices import MAGIC, SliceInfo, read_request
from atoll.errors import OK, StatusError, invalid
from atoll.ifrt.arrays import ArrayRecord
from atoll.ifrt.loaded import Loaded
from atoll.ifrt.pending_request import PendingRequest
from atoll.ir.program import Program
from atoll.protocol import messages as m
from atoll.protocol.ifrt import executables_pb2
from atoll.session.session import ClusterSession


class SliceExecutable(Loaded):
    """Stands for a slice: its devices are those of the slice, and its fingerprint carries the rest."""

    def __init__(self, added: m.SliceAdded, island: int) -> None:
        super().__init__()
        self.slice = added.slice
        self.name = f"slice {added.slice}"
        self.devices = added.devices
        self.fingerprint = msgspec.json.encode(SliceInfo(added.slice, added.shape, island))
        self.functions = ()
        self.outputs = ()
        self.donated = frozenset()

    def unloaded(self, cluster: ClusterSession) -> None:
        cluster.send(m.ReleaseSlice(self.slice))

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        raise _not_run()

    def program(self, preserved: frozenset[int], completion: bool) -> Program:
        raise _not_run()

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise _not_run()

    async def text(self, cluster: ClusterSession) -> str:
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


def is_slice_request(payload: bytes) -> bool:
    """Whether a plugin program asks the resource manager for a slice."""
    return payload.startswith(MAGIC)


def add(pending: PendingRequest, payload: bytes) -> None:
    """Answers with the executable of a new slice. Raises INVALID_ARGUMENT for what is no request."""
    session = pending.session
    slice_request = read_request(bytes(payload[len(MAGIC) :]))
    reply = session.cluster.add_slice(slice_request)  # from here on the client is held back

    async def work() -> Any:
        added = await reply
        island = session.cluster.welcome.devices[added.devices[0]].island
        loaded = SliceExecutable(added, island)
        response = pending.response()
        response.compile.CopyFrom(loaded.compile_reply(session.load(loaded), session.add_future(OK)))
        return response

    pending.reply_later(work(), with_stack=False)
