"""Colocated Python (`jax.experimental.colocated_python`): functions that run in Python processes on the hosts.

A function arrives as a CustomCallProgram with a pickle, which only the session's own processes load. To the cluster it
is another kind of compiled function. Before the first function on a set of islands, all hosts of these islands start
processes of the session, which form one multi-process JAX program.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.errors import invalid, unimplemented
from atoll.executables.loaded_executable import LoadedExecutable
from atoll.executables.program_checks import ArgumentTypes, describe
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Call, Program, single
from atoll.ir.types import ArraySpec, shard_shape
from atoll.protocol.messages import FunctionSource
from atoll.protocol.messages.python_messages import (
    ClientSettings,
    PythonFunction,
    PythonHosts,
    PythonProgram,
    PythonSource,
    split_settings,
)
from atoll.protocol.translation.array_specs import spec_from
from atoll.session.cluster_session import ClusterSession

CUSTOM_CALL_PROGRAM = "xla::ifrt::CustomCallProgram"
_LANGUAGE = "jax_colocated_python_v0.0.1"
MAX_ARRAYS = 1 << 16
_NO_SETTINGS = ClientSettings()
_NO_ESTIMATES = "the cost of a Python function is not known before it runs"


class PythonExecutable(LoadedExecutable):
    """A call of Python on the hosts of its devices. The constructor raises INVALID_ARGUMENT or UNIMPLEMENTED.

    `announced` are the output shardings for the client, in the protocol's form.
    """

    has_streams = True
    runs_apart = False  # whether the processes of different islands run it without one another

    def __init__(
        self,
        cluster: ClusterSession,
        source: PythonSource,
        devices: Sequence[int],
        inputs: Sequence[ArraySpec],
        outputs: Sequence[ArraySpec],
        announced: Sequence[Any],
        settings: ClientSettings = _NO_SETTINGS,
    ) -> None:
        super().__init__()
        self.name = source.name
        self.devices = tuple(devices)
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise invalid("a Python function needs one or more distinct devices")
        cluster.hosts_of(self.devices)
        self.source = source
        self.settings = settings
        self._function = -1
        self.take(inputs)
        self.outputs = tuple(self._checked(each) for each in outputs)
        self._announced = announced

    def take(self, inputs: Sequence[ArraySpec]) -> None:
        """Set the argument types. Raises INVALID_ARGUMENT or UNIMPLEMENTED if they are not supported."""
        self.inputs = tuple(self._checked(each) for each in inputs)
        self._arguments = ArgumentTypes(self.name, self.inputs)

    def _checked(self, spec: ArraySpec) -> ArraySpec:
        if not set(spec.sharding.devices) <= set(self.devices):
            devices = list(spec.sharding.devices)
            raise invalid(f"{self.name} has an array on devices {devices}, which are not devices of the function")
        if spec.dtype in ("token", "opaque"):
            raise invalid(f"{self.name} has an array of dtype {spec.dtype}, which contains no data")
        if len({shard_shape(spec.sharding, spec.shape, i) for i in range(len(spec.sharding.devices))}) > 1:
            raise unimplemented(f"{self.name} has an array whose shards differ in shape: {describe(spec)}")
        return spec

    def compiled(self, function: int) -> None:
        """Record the function's number in the cluster."""
        self._function = function
        self.functions = (function,)

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        self._arguments.check(arguments)

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        inputs = tuple(range(len(self.inputs)))
        call = Call(self._function, inputs, self.outputs, self.devices, completion=completion, stream=stream)
        return single(self.name, self.inputs, call)

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise unimplemented(_NO_ESTIMATES)

    async def text(self, cluster: ClusterSession) -> str:
        return f"{self.name}: a Python function of {len(self.inputs)} arrays to {len(self.outputs)}"

    def output_sharding(self, position: int) -> Any:
        return self._announced[position]


def python_function(proto: Any, cluster: ClusterSession) -> PythonExecutable:
    """Return the executable of a colocated Python function. Raises INVALID_ARGUMENT or UNIMPLEMENTED."""
    if proto.type != _LANGUAGE:
        raise unimplemented(f"custom programs of type {proto.type[:100]!r} are not supported; use {_LANGUAGE}")
    if max(len(proto.input_specs), len(proto.output_specs)) > MAX_ARRAYS:
        raise invalid(f"a Python function takes or returns more than {MAX_ARRAYS} arrays")
    settings, text = split_settings(proto.serialized_program_text)
    return PythonExecutable(
        cluster,
        PythonFunction(proto.name[:200] or "python", text, settings),
        proto.devices.device_ids,
        [spec_from(each) for each in proto.input_specs],
        [spec_from(each) for each in proto.output_specs],
        [each.sharding for each in proto.output_specs],
        settings,
    )


class PythonFunctions:
    """The Python functions of a session, and the start of the session's processes. Sessions do not share functions."""

    def __init__(self, cluster: ClusterSession) -> None:
        self._cluster = cluster
        self._nonce = secrets.token_hex(16)
        self._opened: dict[tuple[int, ...], asyncio.Task[None]] = {}  # by islands

    def close(self) -> None:
        """Cancel what is in progress: the session has ended."""
        for opening in self._opened.values():
            opening.cancel()

    async def register(self, executable: PythonExecutable) -> None:
        """Load the function in the processes of its hosts. Raises StatusError."""
        devices = self._cluster.welcome.devices
        islands = tuple(sorted({devices[device].island for device in executable.devices}))
        if executable.runs_apart:
            for island in islands:
                await self._open((island,), executable.settings)
        else:
            await self._open(islands, executable.settings)
        executable.compiled(await self._register(executable.source, executable.devices, executable.runs_apart))

    async def _open(self, islands: tuple[int, ...], settings: ClientSettings) -> None:
        """Start processes that run together on these islands, unless an earlier function has started them."""
        opening = self._opened.get(islands)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            there = tuple(each.id for each in self._cluster.welcome.devices if each.island in islands)
            opening = self._opened[islands] = asyncio.create_task(self._start(there, settings))
        await asyncio.shield(opening)

    async def _start(self, devices: tuple[int, ...], settings: ClientSettings) -> None:
        number = await self._register(PythonHosts(devices, settings), devices)
        self._cluster.retain_functions((number,))  # until the session ends

    async def _register(self, program: PythonProgram, devices: tuple[int, ...], runs_apart: bool = False) -> int:
        # Python functions have no compile options. A unique text in their place makes the hash unique to the session.
        own = f"{self._nonce} {self._cluster.number()}".encode()
        source = msgspec.msgpack.encode(FunctionSource(msgspec.msgpack.encode(program), own, is_python=True))
        number, _ = await self._cluster.register_function(
            source, hashlib.sha256(source).hexdigest(), (devices,), runs_apart
        )
        return number
