"""Executables of traced programs: many compiled functions and transfers that one request runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from atoll.errors import invalid, unimplemented
from atoll.executables.compiled_executables import Executable
from atoll.executables.loaded_executable import ExecutableWithoutProgram, LoadedExecutable
from atoll.executables.program_checks import ArgumentTypes, ProgramChecker
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Call, Node, Program, consumes, output_count, preserving
from atoll.ir.types import DTYPE_BITS, ArraySpec, Sharding, nbytes
from atoll.ir.validation import MAX_VALUES, check_definition
from atoll.protocol.submission import (
    RUNS_OF_A_READING,
    Deferring,
    Putting,
    Reading,
    SmallWriting,
    Staging,
    Writing,
    decode,
    first_feed,
)
from atoll.protocol.translation.shardings import sharding_to
from atoll.session.cluster_session import ClusterSession
from atoll.transfers.shared_slots import SLOT_BYTES

_ASK_THE_FUNCTIONS = "the cost of a program is not known: query its functions, as Compiled.cost_analysis() does"


def read(data: bytes, loaded: Iterable[LoadedExecutable], cluster: ClusterSession) -> LoadedExecutable:
    """Return an executable for a client's submission. Raises INVALID_ARGUMENT if it is invalid.

    Programs refer to the session's executables, `loaded`, by fingerprint.
    """
    submission = decode(data)
    if isinstance(submission, Staging):
        return StagingExecutable("staging", submission.devices, cluster)
    if isinstance(submission, Reading):
        return ReadingExecutable(submission, cluster)
    if isinstance(submission, Putting):
        return PuttingExecutable(submission, cluster)
    if isinstance(submission, Writing):
        return WritingExecutable(submission, cluster)
    if isinstance(submission, SmallWriting):
        return SmallWritingExecutable(submission, cluster)
    if isinstance(submission, Deferring):
        return DeferringExecutable(*_functions((submission.function,), loaded))
    return ProgramExecutable(submission.program, _functions(submission.functions, loaded), cluster)


def _functions(fingerprints: Sequence[bytes], loaded: Iterable[LoadedExecutable]) -> list[Executable]:
    known = {each.fingerprint: each for each in loaded if isinstance(each, Executable)}
    functions = []
    for fingerprint in fingerprints:
        executable = known.get(fingerprint)
        if executable is None:
            raise invalid(f"a program calls function {fingerprint[:80]!r}, which this session has not compiled")
        executable.loss.raise_if_error()
        functions.append(executable)
    return functions


class ProgramExecutable(LoadedExecutable):
    """A program of the session. `Call.function` are positions in `functions`.

    The constructor raises INVALID_ARGUMENT.
    """

    def __init__(self, program: Program, functions: list[Executable], cluster: ClusterSession) -> None:
        super().__init__()
        # `op_shardings` are XLA's forms of the shardings of all values.
        self.definition, self.op_shardings = ProgramChecker(program, functions, cluster).run()
        self.name = self.definition.name
        self.functions = tuple({each.function: None for each in functions})
        specs = _values(self.definition)
        called = [node.devices for node in self.definition.nodes if isinstance(node, Call)]
        if not specs and not called:
            raise invalid(f"program {self.name!r} is empty")
        self.outputs = tuple(specs[value] for value in self.definition.results)
        # jaxlib's client requires as many devices as the arguments that come with the run have shards.
        last = max(0, len(self.definition.arguments) - 1)
        self.devices = specs[last].sharding.devices if specs else called[0]
        consumed = {value for node in self.definition.nodes for value in consumes(node)}
        self.donated = frozenset(i for i in range(len(self.definition.arguments)) if i in consumed)
        self._arguments = ArgumentTypes(f"program {self.name!r}", self.definition.arguments)

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
        return self._with_completions(nodes)

    def _with_completions(self, nodes: Sequence[Node]) -> Program:
        """Return the program of these nodes with more results: the completions of the calls that end last.

        These are the calls whose outputs no other node uses. A completion is one more output of its call, so the values
        of later nodes get other numbers.
        """
        used = {value for node in nodes for value in node.inputs}
        moved = list(range(len(self.definition.arguments)))  # the new number of each value
        completed: list[Node] = []
        completions = []
        first = total = len(moved)  # the next number, before and after
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

    # ---- queries of JAX

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise unimplemented(_ASK_THE_FUNCTIONS)

    async def text(self, cluster: ClusterSession) -> str:
        return "\n".join(str(node) for node in self.definition.nodes)

    def output_sharding(self, position: int) -> Any:
        spec = self.outputs[position]
        return sharding_to(spec.sharding, spec.shape, self.op_shardings[self.definition.results[position]])


class DeferringExecutable(LoadedExecutable):
    """Runs a compiled function when one of the results is used: see `ifrt.deferred_runs`.

    The constructor raises INVALID_ARGUMENT.
    """

    def __init__(self, function: Executable) -> None:
        super().__init__()
        if len(function.info.parameters) != 1 or not function.outputs or function.donated or function.callbacks:
            raise invalid(f"{function.name} cannot start later: that needs one argument, and donates nothing")
        self._function = function
        self.name = function.name
        self.devices = function.devices
        self.functions = function.functions
        self.outputs = function.outputs

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        self._function.check(arguments)

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        return self._function.program(preserved, completion, stream)

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        await self._function.cost(cluster, reply)

    async def text(self, cluster: ClusterSession) -> str:
        return await self._function.text(cluster)

    def output_sharding(self, position: int) -> Any:
        return self._function.output_sharding(position)


class _Submitted(ExecutableWithoutProgram):
    """An executable of a submission that is no program. The constructor raises INVALID_ARGUMENT."""

    def __init__(self, name: str, devices: tuple[int, ...], cluster: ClusterSession) -> None:
        super().__init__(name, devices)
        cluster.hosts_of(devices)
        if not devices or len(set(devices)) != len(devices):
            raise invalid(f"a {name} request needs one or more distinct devices")


class StagingExecutable(_Submitted):
    """Stages its arguments for the program that runs next: see `atoll.protocol.submission`."""

    def gather(self, staged: list[int], arguments: list[int]) -> None:
        if len(staged) + len(arguments) > MAX_VALUES:
            staged.clear()
            raise invalid(f"a program has more than {MAX_VALUES} arguments")
        staged.extend(arguments)


class _Numbered(_Submitted):
    """An executable whose runs have consecutive numbers."""

    def __init__(self, name: str, devices: tuple[int, ...], number: int, cluster: ClusterSession) -> None:
        super().__init__(name, devices, cluster)
        first = first_feed(number)
        self._numbers = iter(range(first, first + RUNS_OF_A_READING))

    def next_number(self) -> int:
        """Return the number of the next run. Raise INVALID_ARGUMENT if there were too many runs."""
        number = next(self._numbers, None)
        if number is None:
            raise invalid(f"a {self.name} executable can be run {RUNS_OF_A_READING} times")
        return number


class ReadingExecutable(_Numbered):
    """Sends the contents of its argument to the client's process: see `atoll.protocol.submission`."""

    def __init__(self, reading: Reading, cluster: ClusterSession) -> None:
        super().__init__("reading", reading.devices, reading.number, cluster)


class _OfSentContents(_Numbered):
    """Makes an array of contents that the client's process sends, and that have `nbytes` bytes."""

    def __init__(self, name: str, writing: Writing | SmallWriting, cluster: ClusterSession) -> None:
        super().__init__(name, writing.devices, writing.number, cluster)
        dtype, shape = writing.array.dtype, writing.array.shape
        if DTYPE_BITS.get(dtype, 0) < 8:
            raise invalid(f"arrays of dtype {dtype} cannot be made of contents that a client sends")
        self.outputs = (ArraySpec(dtype, shape, Sharding(self.devices, writing.tiling)),)
        check_definition(Program(name, self.outputs, (), (), 0), self.devices)
        self.nbytes = nbytes(ArraySpec(dtype, shape, Sharding(self.devices[:1])))


class WritingExecutable(_OfSentContents):
    """Makes an array of contents that it asks the client for: see `atoll.protocol.submission`.

    The constructor raises INVALID_ARGUMENT.
    """

    def __init__(self, writing: Writing, cluster: ClusterSession) -> None:
        super().__init__("writing", writing, cluster)


class SmallWritingExecutable(_OfSentContents):
    """Makes an array of small contents that the client has sent: see `atoll.protocol.submission`.

    The constructor raises INVALID_ARGUMENT.
    """

    def __init__(self, writing: SmallWriting, cluster: ClusterSession) -> None:
        super().__init__("small writing", writing, cluster)
        if self.nbytes > SLOT_BYTES:
            raise invalid(f"small contents have at most {SLOT_BYTES} bytes, and these {self.nbytes}")


class PuttingExecutable(_Submitted):
    """Makes arrays of contents that it holds: see `atoll.protocol.submission`. Raise INVALID_ARGUMENT."""

    def __init__(self, putting: Putting, cluster: ClusterSession) -> None:
        super().__init__("putting", (putting.device,), cluster)
        for each in putting.arrays:
            if DTYPE_BITS.get(each.dtype, 0) < 8:
                raise invalid(f"arrays of dtype {each.dtype} cannot be made together with others")
        self.outputs = tuple(ArraySpec(each.dtype, each.shape, Sharding(self.devices)) for each in putting.arrays)
        needed = sum(map(nbytes, self.outputs))
        if needed != len(putting.contents):
            raise invalid(f"these arrays need {needed} bytes, but {len(putting.contents)} were sent")
        self.contents = putting.contents


def _values(definition: Program) -> list[ArraySpec]:
    return [*definition.arguments, *(spec for node in definition.nodes for spec in node.outputs)]
