"""Launches of a program that is registered with a cluster.

A call is one IFRT Execute request. Arguments whose number of shards differs from that of the others are sent before it,
in separate requests (`atoll.protocol.submission`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.client import jax_internals as internals
from atoll.client.plugin_programs import staging, submit
from atoll.errors import ProgramError
from atoll.ir.program import Program
from atoll.programs.program_building import Built, devices
from atoll.programs.values import Value
from atoll.protocol.submission import Staging, Submission, encode

internals.leave_out_of_tracebacks(__file__)


class ProgramLaunch:
    """A program that is registered with a cluster. `call` is the hot path."""

    def __init__(self, built: Built) -> None:
        program = built.program
        self._name = program.name
        self._functions = built.functions  # keeps the session from dropping them
        self._effects_on = devices(built) if built.has_effects else None
        self._constants: list[Any] = [None] * len(built.arguments)
        self._leaves: list[tuple[int, int]] = []  # (position of the program's argument, of the user's flat argument)
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
        # Whether the function has made or captured arrays of the program, which a loss of hosts may include.
        self.has_constants = any(each is not None for each in self._constants) or not all(
            each.source for each in built.results
        )
        self._hosts = [slot for slot, _ in hosts]
        self._host_shardings = [sharding for _, sharding in hosts]
        client = _client(built)
        self._stages, self._first = _stages(program, client)
        submission = Submission(program, tuple(function.fingerprint for function in built.functions))
        self._execute = submit(client, encode(submission)).execute_sharded
        self._handlers = [internals.result_handler(v.aval, v.sharding, v.committed) for v in built.made]

    def call(self, leaves: Sequence[Any]) -> list[Any]:
        """Launch the program with the user's flat arguments; return its results."""
        buffers = self._constants.copy()
        for slot, leaf in self._leaves:
            buffers[slot] = internals.buffer(leaves[leaf])
        if self._hosts:
            put = internals.put([buffers[slot] for slot in self._hosts], self._host_shardings)
            for slot, array in zip(self._hosts, put, strict=True):
                buffers[slot] = internals.buffer(array)
        try:
            launched = self._launched(buffers)
            results: list[Any] = launched.consume_with_handlers(self._handlers)
        except Exception:
            internals.check_deleted(buffers)
            raise
        if self._effects_on is not None:
            internals.note_effects(self._effects_on, launched)
        if internals.needs_check_special():
            internals.check_special(self._name, results)
        return results

    def _launched(self, buffers: list[Any]) -> Any:
        # Tokens are ready when all calls have ended, including calls whose results the program does not use.
        with_tokens = self._effects_on is not None
        if not self._stages:
            return self._execute(buffers, with_tokens=True) if with_tokens else self._execute(buffers)
        with staging:
            for stage, first, stop in self._stages:
                stage(buffers[first:stop])
            return self._execute(buffers[self._first :], with_tokens=with_tokens)


def _stages(program: Program, client: Any) -> tuple[list[tuple[Any, int, int]], int]:
    """Return the staging calls, as (call, first argument, end), and the first argument of the launch itself."""
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
            f"program {built.program.name!r} uses devices of {len(clients)} backends, but must use one cluster"
        )
    return clients.pop()
