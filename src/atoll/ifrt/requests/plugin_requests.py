"""Requests of Atoll's own plug-in, which jaxlib's client sends as plugin programs.

A plugin program is the only request of jaxlib's client that can carry arbitrary bytes, and its reply has to be an
executable. So the answer to a question, or a slice, is an executable that is never run, whose fingerprint carries the
content.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atoll.cluster.slice_requests import MAGIC as SLICE
from atoll.cluster.slice_requests import SliceInfo, read_request
from atoll.decodable import decodable
from atoll.errors import invalid, not_found, unimplemented
from atoll.executables.compiled_executables import Executable
from atoll.executables.loaded_executable import ImmediateReply, LoadedExecutable
from atoll.executables.persistence import PERSISTENCE_REQUESTS, persistence_executable
from atoll.executables.profile_executables import PROFILE_REQUESTS, ProfileExecutable
from atoll.executables.program_executables import read
from atoll.executables.python_functions import PythonExecutable
from atoll.executables.reshard_executables import RESHARD_REQUESTS, ReshardExecutable
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import PendingRequest
from atoll.ifrt.requests.contents_requests import read_staged
from atoll.ifrt.requests.published_requests import handle_array_request
from atoll.protocol import messages as m
from atoll.protocol import profiles
from atoll.protocol.callbacks import CALLBACKS_REQUEST
from atoll.protocol.ffi_libraries import LIBRARY_REQUEST
from atoll.protocol.questions import MAGIC as QUESTION
from atoll.protocol.questions import (
    CompiledSource,
    ContentsQuestion,
    IslandsQuestion,
    MemoryQuestion,
    MissingHosts,
    ProfileQuestion,
    SourceQuestion,
    read_question,
)
from atoll.protocol.submission import MAGIC as PROGRAM
from atoll.protocol.version_requests import MAGIC as ARRAYS
from atoll.session.cluster_session import ClusterSession
from atoll.session.profile_queries import ask_hosts, hosts_of


def handle_plugin_program(pending: PendingRequest, payload: bytes) -> bool:
    """Handle a plugin program of a known kind. Return False for other programs.

    Raise INVALID_ARGUMENT if the program is malformed.
    """
    for prefixes, handler in _PLUGIN_PROGRAMS:
        if payload.startswith(prefixes):
            handler(pending, payload)
            return True
    return False


def load_python(pending: PendingRequest, executable: PythonExecutable) -> None:
    """Register a Python executable with the hosts, and reply with it."""

    async def work() -> LoadedExecutable:
        await pending.session.python.register(executable)
        return executable

    pending.reply_loaded_later(work())


def _open_client_relay(pending: PendingRequest, payload: bytes) -> None:
    pending.reply_loaded(pending.session.open_client_relay())


def _submit(pending: PendingRequest, payload: bytes) -> None:
    session = pending.session
    pending.reply_loaded(read(payload, list(session.executables.values()), session.cluster))


def _reshard(pending: PendingRequest, payload: bytes) -> None:
    pending.reply_loaded(ReshardExecutable(payload, pending.session.cluster))


def _persist(pending: PendingRequest, payload: bytes) -> None:
    load_python(pending, persistence_executable(payload, pending.session.cluster))


def _profile(pending: PendingRequest, payload: bytes) -> None:
    pending.reply_loaded(ProfileExecutable(payload, pending.session.cluster))


def _add_library(pending: PendingRequest, payload: bytes) -> None:
    pending.reply_loaded_later(pending.session.libraries.add(bytes(payload[len(LIBRARY_REQUEST) :])))


# ---- slices


class SliceReply(ImmediateReply):
    """The reply that stands for a slice and has its devices. The slice is released when the reply is unloaded."""

    def __init__(self, added: m.SliceAdded, island: int) -> None:
        info = SliceInfo(added.slice, added.shape, island)
        super().__init__(f"slice {added.slice}", added.devices, msgspec.json.encode(info))
        self.slice = added.slice

    def unloaded(self, cluster: ClusterSession) -> None:
        cluster.send(m.ReleaseSlice(self.slice))


def _add_slice(pending: PendingRequest, payload: bytes) -> None:
    session = pending.session
    slice_request = read_request(bytes(payload[len(SLICE) :]))
    reply = session.cluster.add_slice(slice_request)  # holds the client back until the slice is added

    async def work() -> SliceReply:
        added = await reply
        island = session.cluster.welcome.devices[added.devices[0]].island
        return SliceReply(added, island)

    pending.reply_loaded_later(work())


# ---- questions


def _answer(pending: PendingRequest, payload: bytes) -> None:
    question = read_question(bytes(payload))
    if isinstance(question, ContentsQuestion):  # launches now, because the next request may delete the arrays
        pending.reply_loaded_later(read_staged(pending.session, question.arrays))
        return
    pending.reply_loaded_later(_answer_to(pending.session, question))


async def _answer_to(
    session: IfrtSession, question: MemoryQuestion | SourceQuestion | ProfileQuestion | IslandsQuestion
) -> ImmediateReply:
    match question:
        case MemoryQuestion(device=device):
            if device >= len(session.cluster.welcome.devices):
                raise invalid(f"device {device} does not exist")
            return ImmediateReply(
                "memory statistics", (device,), await session.cluster.inquire(m.QueryKind.MEMORY, device)
            )
        case SourceQuestion(fingerprint=fingerprint):
            return _source(session, fingerprint)
        case ProfileQuestion(request=request):
            return await _answer_of_hosts(session, request)
        case IslandsQuestion(leaves=leaves):
            return ImmediateReply("islands", (0,), msgspec.json.encode(session.cluster.devices_away(leaves)))


async def _answer_of_hosts(session: IfrtSession, request: profiles.Request) -> ImmediateReply:
    if isinstance(request, profiles.Collect) and request.directory:
        raise invalid("a profile is sent to the client that requests it, and cannot be written to a directory")
    hosts = hosts_of(session.cluster)
    missing = await ask_hosts(session.cluster, hosts, request)
    content = MissingHosts({host: status.message for host, status in missing.items()})
    return ImmediateReply("profile", tuple(hosts.values())[:1], msgspec.json.encode(content))


def _source(session: IfrtSession, fingerprint: bytes) -> ImmediateReply:
    for each in session.executables.values():
        if isinstance(each, Executable) and each.fingerprint == fingerprint:
            each.loss.raise_if_error()
            encoded = session.cluster.source(each.function)
            source = msgspec.msgpack.decode(encoded, type=decodable(m.FunctionSource))
            if source.keys:
                raise unimplemented(
                    f"{each.name} calls this process while XLA compiles it: no other process can load it"
                )
            content = CompiledSource(source.program, source.options, each.assignment, len(source.callbacks))
            return ImmediateReply(f"source of {each.name}", each.devices, msgspec.msgpack.encode(content))
    raise not_found("no executable of this session has that fingerprint")


# By prefix: programs of Atoll, and JSON of `pathwaysutils`.
_PLUGIN_PROGRAMS: tuple[tuple[bytes | tuple[bytes, ...], Callable[[PendingRequest, bytes], None]], ...] = (
    (SLICE, _add_slice),
    (CALLBACKS_REQUEST, _open_client_relay),
    (LIBRARY_REQUEST, _add_library),
    (QUESTION, _answer),
    (ARRAYS, handle_array_request),
    (PROGRAM, _submit),
    (RESHARD_REQUESTS, _reshard),
    (PERSISTENCE_REQUESTS, _persist),
    (PROFILE_REQUESTS, _profile),
)
