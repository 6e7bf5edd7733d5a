"""Slices: to JAX, executables that are never run. A slice lives until its executable is destructed."""

from __future__ import annotations

import msgspec

from atoll.cluster.slice_requests import MAGIC, SliceInfo, read_request
from atoll.executables.loaded_executable import ImmediateExecutable
from atoll.ifrt.pending_request import PendingRequest
from atoll.protocol import messages as m
from atoll.session.cluster_session import ClusterSession


class SliceExecutable(ImmediateExecutable):
    """Stands for a slice: its devices are those of the slice, and its fingerprint carries the rest."""

    def __init__(self, added: m.SliceAdded, island: int) -> None:
        info = SliceInfo(added.slice, added.shape, island)
        super().__init__(f"slice {added.slice}", added.devices, msgspec.json.encode(info))
        self.slice = added.slice

    def unloaded(self, cluster: ClusterSession) -> None:
        cluster.send(m.ReleaseSlice(self.slice))


def add(pending: PendingRequest, payload: bytes) -> None:
    """Answers with the executable of a new slice. Raises INVALID_ARGUMENT for what is no request."""
    session = pending.session
    slice_request = read_request(bytes(payload[len(MAGIC) :]))
    reply = session.cluster.add_slice(slice_request)  # from here on the client is held back

    async def work() -> SliceExecutable:
        added = await reply
        island = session.cluster.welcome.devices[added.devices[0]].island
        return SliceExecutable(added, island)

    pending.reply_loaded_later(work())
