"""Requests to publish arrays and to read published arrays, which arrive as plugin programs."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from atoll.errors import OK, StatusError, invalid
from atoll.executables.loaded_executable import ImmediateReply
from atoll.executables.published_executables import ReadExecutable
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import PendingRequest
from atoll.ir.program import Mapping, Rearrange, single
from atoll.protocol import messages as m
from atoll.protocol.version_requests import (
    NumberedVersion,
    OpenArrays,
    OpenedArrays,
    PublishArrays,
    ReadArrays,
    read_request,
)
from atoll.quantities import counted
from atoll.session.cluster_session import ClusterSession


def handle_array_request(pending: PendingRequest, payload: bytes) -> None:
    """Handle a request. Raise INVALID_ARGUMENT if it is malformed."""
    request = read_request(bytes(payload))
    match request:
        case PublishArrays():
            pending.reply_loaded_later(_publish(pending.session, request))
        case OpenArrays():
            pending.reply_loaded_later(_open(pending.session.cluster, request))
        case ReadArrays():
            pending.reply_loaded(ReadExecutable(request, pending.session.cluster))


def _publish(session: IfrtSession, request: PublishArrays) -> Coroutine[Any, Any, ImmediateReply]:
    """Publish views of the staged arrays now, because the next request may donate or delete the arrays."""
    handles = list(session.staged)
    session.staged.clear()
    if request.paths and len(handles) != len(request.paths):
        raise invalid(f"a request publishes {counted(len(request.paths), 'array')}, but {len(handles)} are staged")
    if not request.paths:
        return _reply(NumberedVersion(OK))
    cluster = session.cluster
    donates = session.note_published(request.name, handles)
    views = []
    for first in range(0, len(handles), m.MAX_READ):
        part = handles[first : first + m.MAX_READ]
        specs = tuple(session.arrays.spec(handle) for handle in part)
        whole = [(0, len(spec.sharding.devices), 1) for spec in specs]
        mappings = tuple(Mapping(i, i, each, each) for i, each in enumerate(whole))
        node = Rearrange(tuple(range(len(specs))), specs, mappings)
        program = cluster.programs.number(("publish", node), partial(single, "publish", specs, node))
        made = [cluster.mint() for _ in part]
        session.launch(program, part, made)
        views += made
    published = cluster.publish(
        request.name, request.keep, views, request.paths, request.structure, request.replicas, request.on_disk
    )
    return _published(published, donates)


async def _reply(numbered: NumberedVersion) -> ImmediateReply:
    return ImmediateReply(f"version {numbered.version}", (0,), msgspec.msgpack.encode(numbered))


async def _published(version: Coroutine[Any, Any, int], donates: bool) -> ImmediateReply:
    try:
        return await _reply(NumberedVersion(OK, await version, donates))
    except StatusError as error:
        return await _reply(NumberedVersion(error.status))


class OpenVersionReply(ImmediateReply):
    """The reply that stands for an open version, which is closed when the reply is unloaded."""

    def __init__(self, opened: m.VersionOpened, losses: int) -> None:
        content = OpenedArrays(OK, opened.reader, opened.version, opened.arrays, opened.structure, losses)
        super().__init__(f"version {opened.version}", (0,), msgspec.msgpack.encode(content))
        self._reader = opened.reader

    def unloaded(self, cluster: ClusterSession) -> None:
        cluster.send(m.CloseVersion(self._reader))


async def _open(cluster: ClusterSession, request: OpenArrays) -> ImmediateReply:
    try:
        opened = await cluster.open_version(
            request.name, request.version, request.newer_than, request.seconds, request.in_files
        )
    except StatusError as error:
        return ImmediateReply("no version", (0,), msgspec.msgpack.encode(OpenedArrays(error.status)))
    if request.in_files:
        content = OpenedArrays(OK, version=opened.version)
        return ImmediateReply(f"version {opened.version}", (0,), msgspec.msgpack.encode(content))
    return OpenVersionReply(opened, cluster.losses)
