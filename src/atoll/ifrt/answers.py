"""Answers to what only Atoll's own plug-in asks: to jaxlib's client, executables that are never run.

A plugin program is the one request of jaxlib's client that carries any bytes, and an executable is its only reply. The
executable's fingerprint carries the answer.
"""

from __future__ import annotations

import msgspec

from atoll.errors import invalid, not_found, unimplemented
from atoll.executables.compiled_executables import Executable
from atoll.executables.loaded_executable import ImmediateExecutable
from atoll.ifrt.ifrt_session import IfrtSession
from atoll.ifrt.pending_request import PendingRequest
from atoll.protocol import profiles
from atoll.protocol.messages import FunctionSource
from atoll.protocol.questions import (
    CompiledSource,
    IslandsQuestion,
    MemoryQuestion,
    MissingHosts,
    ProfileQuestion,
    Question,
    SourceQuestion,
    read_question,
)
from atoll.session.profile_queries import ask_hosts, hosts_of


def answer(pending: PendingRequest, payload: bytes) -> None:
    """Answers a question of the plug-in's. Raises INVALID_ARGUMENT for what is none."""
    pending.reply_loaded_later(_answer(pending.session, read_question(bytes(payload))))


async def _answer(session: IfrtSession, question: Question) -> ImmediateExecutable:
    match question:
        case MemoryQuestion(device=device):
            if device >= len(session.cluster.welcome.devices):
                raise invalid(f"device {device} does not exist")
            return ImmediateExecutable("memory statistics", (device,), await session.cluster.inquire("memory", device))
        case SourceQuestion(fingerprint=fingerprint):
            return _source(session, fingerprint)
        case ProfileQuestion(request=request):
            return await _profile(session, request)
        case IslandsQuestion(leaves=leaves):
            return ImmediateExecutable("islands", (0,), msgspec.json.encode(session.cluster.devices_away(leaves)))


async def _profile(session: IfrtSession, request: profiles.Request) -> ImmediateExecutable:
    if isinstance(request, profiles.Collect) and request.directory:
        raise invalid("a profile goes to the client that asks for it")
    hosts = hosts_of(session.cluster)
    missing = await ask_hosts(session.cluster, hosts, request)
    content = MissingHosts({host: status.message for host, status in missing.items()})
    return ImmediateExecutable("profile", tuple(hosts.values())[:1], msgspec.json.encode(content))


def _source(session: IfrtSession, fingerprint: bytes) -> ImmediateExecutable:
    for each in session.executables.values():
        if isinstance(each, Executable) and each.fingerprint == fingerprint:
            each.loss.raise_if_error()
            if each.callbacks:
                raise unimplemented(f"{each.name} calls back into this process: it cannot be run in another")
            encoded = session.cluster.source(each.function)
            source = msgspec.msgpack.decode(encoded, type=FunctionSource)
            content = CompiledSource(source.program, source.options, each.assignment)
            return ImmediateExecutable(f"source of {each.name}", each.devices, msgspec.msgpack.encode(content))
    raise not_found("no executable of this session has that fingerprint")
