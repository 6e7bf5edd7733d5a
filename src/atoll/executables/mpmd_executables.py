"""Executables of IFRT IR programs, which run functions on several meshes (MPMD), such as those of Shardy.

A compiler process reads the program's outline, and each fragment is a compiled function of the session. A run is one
launch of the program that calls them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from atoll.decodable import decodable
from atoll.errors import Code, StatusError, invalid, unimplemented
from atoll.executables.compiled_executables import Executable, fill_costs
from atoll.executables.mpmd_order import ordered
from atoll.executables.mpmd_requests import MpmdRequest
from atoll.executables.program_checks import op_sharding
from atoll.executables.program_executables import ProgramExecutable
from atoll.ir.outline import Fragment, Outline
from atoll.ir.program import Call, consumes
from atoll.protocol.ifrt import executables_pb2, xla_pb2
from atoll.protocol.messages import FunctionInfo, QueryKind
from atoll.protocol.translation.array_specs import layout_proto_from_text
from atoll.session.cluster_session import ClusterSession

_PER_FRAGMENT = "an MPMD program runs several functions: query the cost of each fragment"


class MpmdExecutable(ProgramExecutable):
    """A program of several meshes. `functions` are those of the outline's fragments.

    The constructor raises INVALID_ARGUMENT.
    """

    def __init__(
        self, outline: Outline, functions: list[Executable], request: MpmdRequest, cluster: ClusterSession
    ) -> None:
        program = ordered(outline.program, lambda device: cluster.hosts_of((device,))[0])
        super().__init__(program, functions, cluster)
        self.devices = request.devices
        self.fingerprint = hashlib.sha256(b"".join(each.fingerprint for each in functions)).hexdigest().encode()
        self.meshes = {each.key: each.devices for each in outline.fragments}
        if len(self.meshes) < len(functions):
            raise invalid("a fragment of the program runs on two meshes of the same name")
        self.donated = self.donated | frozenset(outline.donated)
        consumed = {value for node in self.definition.nodes for value in consumes(node)}
        self.deleted = frozenset(outline.donated) - consumed
        self._fragments = dict(zip(self.meshes, functions, strict=True))
        self._by_number = {each.function: each for each in functions}

    # ---- queries of JAX

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise unimplemented(_PER_FRAGMENT)

    async def text(self, cluster: ClusterSession) -> str:
        texts = [f"{name}:\n{await function.text(cluster)}" for name, function in self._fragments.items()]
        return "\n\n".join((await super().text(cluster), *texts))

    def metadata_reply(self) -> Any:
        reply = super().metadata_reply()
        for layouts, texts in (
            (reply.parameter_layouts_list, self._argument_layouts()),
            (reply.output_layouts_list, self._output_layouts()),
        ):
            layouts.SetInParent()
            layouts.layouts.extend(map(layout_proto_from_text, texts))
        for field, shardings in (
            (reply.parameter_shardings, [op_sharding(spec) for spec in self.definition.arguments]),
            (reply.output_shardings, [self.op_shardings[value] for value in self.definition.results]),
        ):
            if None not in shardings:
                field.SetInParent()
                field.shardings.extend(xla_pb2.OpSharding.FromString(each or b"") for each in shardings)
        self.mpmd_metadata(reply)
        return reply

    def mpmd_metadata(self, reply: Any) -> None:
        reply.mpmd_compiled_memory_stats.SetInParent()
        for name, function in self._fragments.items():
            stats = reply.mpmd_compiled_memory_stats.compiled_memory_stats[name]
            for field, value in function.info.memory_stats.items():
                setattr(stats, field, value)

    async def mpmd_cost(self, cluster: ClusterSession, reply: Any) -> None:
        reply.attributes.SetInParent()
        for name, function in self._fragments.items():
            found = executables_pb2.ExecutableCostAnalysisReply()
            fill_costs(await cluster.inquire(QueryKind.COST, function.devices[0], function.function), found)
            reply.attributes.attributes[name].CopyFrom(found.attributes)

    def _argument_layouts(self) -> list[str]:
        """Return the layouts in XLA's text form. Arguments that no fragment takes have the row-major layout."""
        texts = [_row_major(len(spec.shape)) for spec in self.definition.arguments]
        for call, function in self._calls():
            for value, layout in zip(call.inputs, function.info.parameter_layouts, strict=False):
                if value < len(texts):
                    texts[value] = layout.decode()
        return texts

    def _output_layouts(self) -> list[str]:
        made = {}
        first = len(self.definition.arguments)
        for node in self.definition.nodes:
            for i in range(len(node.outputs)):
                if isinstance(node, Call):
                    made[first + i] = self._by_number[node.function].info.outputs[i].layout.decode()
            first += len(node.outputs)
        results = zip(self.definition.results, self.outputs, strict=True)
        return [made.get(value) or _row_major(len(spec.shape)) for value, spec in results]

    def _calls(self) -> Iterator[tuple[Call, Executable]]:
        for node in self.definition.nodes:
            if isinstance(node, Call):
                yield node, self._by_number[node.function]


def _row_major(rank: int) -> str:
    return "{" + ",".join(map(str, reversed(range(rank)))) + "}"


async def compile_mpmd(request: MpmdRequest, cluster: ClusterSession) -> MpmdExecutable:
    """Compile an IFRT IR program. Raise StatusError, which names the fragment that cannot be compiled."""
    job = request.outline_job()
    number, encoded = await cluster.register_function(job.source, job.content, job.assignment)
    _release(cluster, [number])
    outline = msgspec.msgpack.decode(encoded, type=decodable(FunctionInfo)).outline
    if outline is None:
        raise StatusError(Code.INTERNAL, "a host has not answered with the outline of an IFRT IR program")
    outline = outline.on(request.devices)
    outcomes = await asyncio.gather(
        *(_compile(request, each, cluster) for each in outline.fragments), return_exceptions=True
    )
    functions = [each for each in outcomes if isinstance(each, Executable)]
    try:
        for each in outcomes:
            if isinstance(each, BaseException):
                raise each
        return MpmdExecutable(outline, functions, request, cluster)
    except BaseException:
        _release(cluster, [each.function for each in functions])
        raise


async def _compile(request: MpmdRequest, fragment: Fragment, cluster: ClusterSession) -> Executable:
    job = request.fragment_job(fragment)
    try:
        number, encoded = await cluster.register_function(job.source, job.content, job.assignment)
    except StatusError as error:
        text = f"fragment {fragment.name} on mesh {fragment.mesh}: {error.status.message}"
        error.status.reworded(text).raise_if_error()
        raise
    return Executable(number, msgspec.msgpack.decode(encoded, type=decodable(FunctionInfo)), job)


def _release(cluster: ClusterSession, functions: Sequence[int]) -> None:
    """Release functions that no executable retains."""
    cluster.retain_functions(functions)
    cluster.drop_functions(functions)
