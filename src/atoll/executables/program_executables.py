"""Programs that a client has traced: many compiled functions and transfers, run by one request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from atoll.errors import Code, Status, invalid, unimplemented
from atoll.executables.arguments import Arguments
from atoll.executables.compiled_executables import Executable
from atoll.executables.loaded_executable import MPMD_ERROR, NO_LAYOUTS, LoadedExecutable
from atoll.executables.program_checks import ProgramChecker
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Call, Node, Program, consumes, output_count, preserving
from atoll.ir.types import ArraySpec
from atoll.ir.validation import MAX_VALUES
from atoll.protocol.ifrt import executables_pb2
from atoll.protocol.submission import Staging, Submission, decode
from atoll.protocol.translation import codec
from atoll.protocol.translation.shardings import sharding_to
from atoll.session.cluster_session import ClusterSession

_NOTHING_RUNS = "staged arguments wait for their program; nothing runs here"
_ASK_THE_FUNCTIONS = "a program has no cost of its own: ask the functions that it calls (Compiled.cost_analysis() does)"


def read(data: bytes, loaded: Iterable[LoadedExecutable], cluster: ClusterSession) -> LoadedExecutable:
    """What a client has submitted, checked. Raises INVALID_ARGUMENT where it makes no sense.

    `loaded` are the session's executables, which programs may name by their fingerprints.
    """
    submission = decode(data)
    if isinstance(submission, Staging):
        return StagingExecutable(submission, cluster)
    return ProgramExecutable(submission, loaded, cluster)


class ProgramExecutable(LoadedExecutable):
    """A traced program of the session. Raises INVALID_ARGUMENT from the constructor."""

    def __init__(self, submission: Submission, loaded: Iterable[LoadedExecutable], cluster: ClusterSession) -> None:
        super().__init__()
        known = {each.fingerprint: each for each in loaded if isinstance(each, Executable)}
        functions = []
        for fingerprint in submission.functions:
            executable = known.get(fingerprint)
            if executable is None:
                raise invalid(f"a program calls function {fingerprint[:80]!r}, which this session has not compiled")
            executable.loss.raise_if_error()
            functions.append(executable)
        self.definition, self._op_shardings = ProgramChecker(submission.program, functions, cluster).run()
        self.name = self.definition.name
        self.functions = tuple({each.function: None for each in functions})
        specs = _values(self.definition)
        called = [node.devices for node in self.definition.nodes if isinstance(node, Call)]
        if not specs and not called:
            raise invalid(f"program {self.name!r} is empty")
        self.outputs = tuple(specs[value] for value in self.definition.results)
        # For jaxlib's client: as many as the arguments that come with the run have shards.
        last = max(0, len(self.definition.arguments) - 1)
        self.devices = specs[last].sharding.devices if specs else called[0]
        consumed = {value for node in self.definition.nodes for value in consumes(node)}
        self.donated = frozenset(i for i in range(len(self.definition.arguments)) if i in consumed)
        self._arguments = Arguments(f"program {self.name!r}", self.definition.arguments)

    def gather(self, staged: list[int], arguments: list[int]) -> list[int]:
        every = [*staged, *arguments]
        staged.clear()
        return every

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        self._arguments.check(arguments)

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        nodes = tuple(preserving(node, preserved) for node in self.definition.nodes)
        if not completion:
            return msgspec.structs.replace(self.definition, nodes=nodes)
        # The calls on which no other node waits end last. Their completions are values, so those after them move.
        used = {value for node in nodes for value in node.inputs}
        moved = list(range(len(self.definition.arguments)))
        completed: list[Node] = []
        completions = []
        total = len(moved)
        first = total
        for node in nodes:
            outputs = range(first, first + len(node.outputs))
            first = outputs.stop
            node = msgspec.structs.replace(node, inputs=tuple(moved[value] for value in node.inputs))
            if isinstance(node, Call) and used.isdisjoint(outputs):
                node = msgspec.structs.replace(node, completion=True)
                completions.append(total + len(node.outputs))
            moved.extend(range(total, total + len(node.outputs)))
            total += output_count(node)
            completed.append(node)
        results = (*(moved[value] for value in self.definition.results), *completions)
        return msgspec.structs.replace(self.definition, nodes=tuple(completed), results=results)

    def awaited(self, handles: Sequence[int], completions: Sequence[int]) -> tuple[int, ...]:
        return (*handles, *completions)

    # ---- what JAX asks

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise unimplemented(_ASK_THE_FUNCTIONS)

    async def text(self, cluster: ClusterSession) -> str:
        return "\n".join(str(node) for node in self.definition.nodes)

    def metadata_reply(self) -> Any:
        return metadata_reply([output.sharding.memory_kind for output in self.outputs], sorted(self.donated))

    def output_sharding(self, position: int) -> Any:
        spec = self.outputs[position]
        return sharding_to(spec.sharding, spec.shape, self._op_shardings[self.definition.results[position]])


class StagingExecutable(LoadedExecutable):
    """Keeps its arguments for the program that is run next; see `atoll.protocol.submission`."""

    def __init__(self, submission: Staging, cluster: ClusterSession) -> None:
        super().__init__()
        cluster.hosts_of(submission.devices)
        if not submission.devices or len(set(submission.devices)) != len(submission.devices):
            raise invalid("arguments are staged by devices, each once")
        self.name = "staging"
        self.devices = submission.devices

    def gather(self, staged: list[int], arguments: list[int]) -> None:
        if len(staged) + len(arguments) > MAX_VALUES:
            staged.clear()
            raise invalid(f"more than {MAX_VALUES} arguments of one program")
        staged.extend(arguments)

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        raise unimplemented(_NOTHING_RUNS)

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        raise unimplemented(_NOTHING_RUNS)

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise unimplemented(_NOTHING_RUNS)

    async def text(self, cluster: ClusterSession) -> str:
        raise unimplemented(_NOTHING_RUNS)

    def metadata_reply(self) -> Any:
        return metadata_reply((), ())


def metadata_reply(memory_kinds: Sequence[str], donated: Sequence[int]) -> Any:
    reply = executables_pb2.ExecutableMetadataReply()
    reply.parameter_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
    reply.output_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
    kinds = reply.output_memory_kinds.memory_kind_lists.add()
    kinds.memory_kinds.extend(memory_kinds)
    reply.donated_input_indices.SetInParent()
    reply.donated_input_indices.donated_input_indices.extend(donated)
    no_stats = Status(Code.UNIMPLEMENTED, "a program's memory is that of its functions and of its arrays")
    reply.compiled_memory_stats_error.CopyFrom(codec.status_to(no_stats))
    reply.mpmd_compiled_memory_stats_error.CopyFrom(codec.status_to(MPMD_ERROR))
    return reply


def _values(definition: Program) -> list[ArraySpec]:
    return [*definition.arguments, *(spec for node in definition.nodes for spec in node.outputs)]
