"""From a recording to something that launches: the program in numbers, and the quick path of a call.

One call is one Execute. Only arguments whose number of shards is not that of the others go ahead of it, in messages of
their own (`atoll.ir.submission`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from atoll.client import jax_internals as internals
from atoll.client.placing import Function
from atoll.client.plugin_programs import is_atoll, submit
from atoll.client.tracing import Called, Migrated, Recording
from atoll.client.values import Value
from atoll.errors import ProgramError
from atoll.ir.program import Call, Node, Program, Transfer
from atoll.ir.submission import Staging, Submission, encode

internals.leave_out_of_tracebacks(__file__)

# What is staged and the launch that takes it must not be parted by another thread's.
_staging = threading.Lock()


@dataclass(frozen=True)
class Built:
    """A program, the functions that its calls number, and what its arguments and results are to the user.

    `arguments` and `made` are what the program takes and gives, `given` are the user's arguments.
    """

    program: Program
    functions: tuple[Function, ...]
    arguments: tuple[Value, ...]
    given: tuple[Value, ...]
    made: tuple[Value, ...]
    results: tuple[Result, ...]

    @property
    def plain(self) -> bool:
        """Whether the user's results are the program's."""
        return self.results == tuple(Result("made", i) for i in range(len(self.made)))

    def returned(self, made: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """The user's results, of the program's and of the user's arguments."""
        results = []
        for each in self.results:
            if each.source == "made":
                results.append(made[each.number])
            else:
                results.append(_unchanged(leaves[each.number], each) if each.source else each.constant)
        return results

    def described(self) -> list[Any]:
        """A value for each of the user's results, or an array."""
        places = {"made": self.made, "given": self.given}
        return [places[each.source][each.number] if each.source else each.constant for each in self.results]


@dataclass(frozen=True)
class Result:
    """One of the user's results: which of the program's ("made") or the user's arguments ("given"); else an array.

    An argument is returned with another sharding than it came with, where the function has put it there.
    """

    source: str
    number: int = 0
    constant: Any = None
    sharding: Any = None


def _unchanged(leaf: Any, result: Result) -> Any:
    if result.sharding is not None:
        return jax.device_put(leaf, result.sharding)
    return leaf if hasattr(leaf, "sharding") else jax.numpy.asarray(leaf)


def build(recording: Recording, donated: frozenset[int]) -> Built:
    """Numbers a recording's values. `donated` are those of its arguments that the user gives away.

    Waits for XLA where it is XLA that chooses a sharding. Raises ProgramError.
    """
    nodes = _needed(recording)
    _give_away(recording, nodes, [recording.arguments[i].root for i in sorted(donated)])
    made = {id(value.root) for node in nodes for value in node.outputs}
    used = list({id(v.root): v.root for node in nodes for v in node.inputs if id(v.root) not in made}.values())
    counts = Counter(len(value.spec.sharding.devices) for value in used)
    arguments = sorted(used, key=lambda value: (counts[n := len(value.spec.sharding.devices)], n))
    numbers = {id(value): i for i, value in enumerate(arguments)}
    functions: dict[int, int] = {}
    compiled: list[Function] = []
    body: list[Node] = []
    for node in nodes:
        inputs = tuple(numbers[id(value.root)] for value in node.inputs)
        outputs = tuple(value.spec for value in node.outputs)
        for value in node.outputs:
            numbers[id(value)] = len(numbers)
        if isinstance(node, Migrated):
            body.append(Transfer(inputs, outputs, node.donated, reshard=True))
            continue
        if id(node.function) not in functions:
            functions[id(node.function)] = len(compiled)
            compiled.append(node.function)
        devices = tuple(device.id for device in node.function.devices)
        body.append(Call(functions[id(node.function)], inputs, outputs, devices, node.donated))
    leaves = {id(value.root): i for i, value in enumerate(recording.arguments)}
    returned: dict[int, Value] = {}
    results = []
    for each in recording.results:
        if not isinstance(each, Value):
            results.append(Result("", constant=each))
        elif id(each.root) in leaves:
            put = each.of is not None
            results.append(Result("given", leaves[id(each.root)], sharding=each.sharding if put else None))
        elif each.root.constant is not None:
            results.append(Result("", constant=each.root.constant))
        else:
            returned.setdefault(id(each.root), each)
            results.append(Result("made", list(returned).index(id(each.root))))
    program = Program(
        recording.name,
        tuple(value.spec for value in arguments),
        tuple(body),
        tuple(numbers[root] for root in returned),
    )
    return Built(
        program,
        tuple(compiled),
        tuple(arguments),
        tuple(recording.arguments),
        tuple(returned.values()),
        tuple(results),
    )


def _needed(recording: Recording) -> list[Called | Migrated]:
    """The nodes on which a result depends, and those that consume something of the user's."""
    wanted = {id(each.root) for each in recording.results if isinstance(each, Value)}
    users = {id(value.root) for value in recording.arguments}
    nodes = []
    for node in reversed(recording.nodes):
        consumes = node.inputs if isinstance(node, Migrated) and node.donated else []
        if isinstance(node, Called):
            consumes = [node.inputs[i] for i in node.donated]
        if any(id(value.root) in wanted for value in node.outputs) or any(
            id(value.root) in users or value.root.constant is not None for value in consumes
        ):
            wanted.update(id(value.root) for value in node.inputs)
            nodes.append(node)
    return nodes[::-1]


def _give_away(recording: Recording, nodes: list[Called | Migrated], arguments: Sequence[Value]) -> None:
    """Has the last node that uses a donated argument consume it, unless the argument itself is a result."""
    returned = {id(each.root) for each in recording.results if isinstance(each, Value)}
    for value in arguments:
        users = [node for node in nodes if any(each.root is value for each in node.inputs)]
        if value.donated or not users or id(value) in returned:
            continue
        last = users[-1]
        positions = {i for i, each in enumerate(last.inputs) if each.root is value}
        if len(positions) > 1:
            continue
        if isinstance(last, Migrated):
            last.donated = True
        else:
            last.donated = tuple(sorted({*last.donated, *positions}))
            last.function = recording.placer.consuming(last.function, positions)


class Launch:
    """A program that a cluster knows. `call` is the path of every call."""

    def __init__(self, built: Built) -> None:
        program = built.program
        self._name = program.name
        self._functions = built.functions  # the session must not drop them
        self._constants: list[Any] = [None] * len(built.arguments)
        self._leaves: list[tuple[int, int]] = []  # (slot of the program's argument, leaf of the user's)
        hosts: list[tuple[int, Any]] = []
        leaf_of = {id(value.root): i for i, value in enumerate(built.given)}
        shared: list[tuple[int, Value]] = []
        for slot, value in enumerate(built.arguments):
            if id(value) in leaf_of:
                self._leaves.append((slot, leaf_of[id(value)]))
                if value.host:
                    hosts.append((slot, value.sharding))
            elif value.host:
                shared.append((slot, value))
            else:
                self._constants[slot] = internals.buffer(value.constant)
        if shared:
            arrays = internals.put([v.constant for _, v in shared], [v.sharding for _, v in shared])
            for (slot, _), array in zip(shared, arrays, strict=True):
                self._constants[slot] = internals.buffer(array)
        self._hosts = [slot for slot, _ in hosts]
        self._host_shardings = [sharding for _, sharding in hosts]
        client = _client(built)
        self._stages, self._first = _stages(program, client)
        submission = Submission(program, tuple(function.fingerprint for function in built.functions))
        self._execute = submit(client, encode(submission)).execute_sharded
        self._handlers = [internals.result_handler(v.aval, v.sharding, v.committed) for v in built.made]

    def call(self, leaves: Sequence[Any]) -> list[Any]:
        """The program's results, for the user's flat arguments."""
        buffers = self._constants.copy()
        for slot, leaf in self._leaves:
            buffers[slot] = internals.buffer(leaves[leaf])
        if self._hosts:
            put = internals.put([buffers[slot] for slot in self._hosts], self._host_shardings)
            for slot, array in zip(self._hosts, put, strict=True):
                buffers[slot] = internals.buffer(array)
        try:
            results: list[Any] = self._launched(buffers).consume_with_handlers(self._handlers)
        except Exception:
            internals.check_deleted(buffers)
            raise
        if internals.needs_check_special():
            internals.check_special(self._name, results)
        return results

    def _launched(self, buffers: list[Any]) -> Any:
        if not self._stages:
            return self._execute(buffers)
        with _staging:
            for stage, first, stop in self._stages:
                stage(buffers[first:stop])
            return self._execute(buffers[self._first :])


def _stages(program: Program, client: Any) -> tuple[list[tuple[Any, int, int]], int]:
    """What goes ahead of the launch: (how, from this argument, to this one); and where its own begin."""
    counts = [len(spec.sharding.devices) for spec in program.arguments]
    stages = []
    first = 0
    for stop in range(1, len(counts)):
        if counts[stop] != counts[first]:
            staging = Staging(program.arguments[first].sharding.devices)
            stages.append((submit(client, encode(staging)).execute_sharded, first, stop))
            first = stop
    return stages, first


def _client(built: Built) -> Any:
    clients = {device.client for device in devices(built)}
    if len(clients) != 1:
        raise ProgramError(
            f"program {built.program.name!r} uses devices of {len(clients)} backends; a program runs on one cluster"
        )
    return clients.pop()


def devices(built: Built) -> set[Any]:
    """All devices on which it stores or computes anything."""
    values = [*built.arguments, *built.made]
    found = {device for value in values for device in internals.devices_of(value.sharding) or ()}
    return found.union(*(function.devices for function in built.functions))


def on_atoll(built: Built) -> bool:
    return all(is_atoll(device.client) for device in devices(built))
