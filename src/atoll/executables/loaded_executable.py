"""The interface of executables, which a session runs and JAX queries by handle, and replies that look like them.

All methods run on the session's event loop.
"""

from __future__ import annotations

import abc
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from atoll.errors import OK, Code, Status, StatusError, invalid, unimplemented
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Program
from atoll.ir.types import ArraySpec
from atoll.protocol.ifrt import executables_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.shardings import sharding_to
from atoll.session.cluster_session import ClusterSession

NO_LAYOUTS = Status(Code.UNIMPLEMENTED, "XLA reports no layouts for functions with tokens")
MPMD_ERROR = Status(Code.INVALID_ARGUMENT, "this executable runs on one mesh: it is not an MPMD executable")


class LoadedExecutable(abc.ABC):
    """An executable that a session runs by handle, such as a compiled function or a traced program.

    The session retains `functions` for as long as it has the executable. A run may also return completions, which are
    not arrays, after its `outputs`.
    """

    name: str
    devices: tuple[int, ...]
    fingerprint = b""  # programs of the same session refer to the executable by it
    functions: tuple[int, ...] = ()
    outputs: tuple[ArraySpec, ...] = ()
    donated: frozenset[int] = frozenset()
    deleted: frozenset[int] = frozenset()  # the part of `donated` that a run deletes, because its program does not
    meshes: Mapping[str, tuple[int, ...]] | None = None  # the devices by fragment, if it runs on several meshes (MPMD)
    callbacks: tuple[int, ...] = ()  # the client's numbers of the callables that it calls in the client's process
    has_streams = False  # whether runs depend on their stream; devices order their work themselves
    loss = OK  # the error of all runs, if the executable cannot run any more

    def __init__(self) -> None:
        # The registered programs that run the executable, with the number of their completions. The key has the
        # preserved arguments, whether the caller requests the run's status, and the run's stream.
        self.programs: dict[tuple[frozenset[int], bool, int], tuple[int, int]] = {}

    def unloaded(self, cluster: ClusterSession) -> None:
        """Called when the session has released the executable."""
        return None

    def gather(self, staged: list[int], arguments: list[int]) -> list[int] | None:
        """Return the handles of all arguments of a run, including staged ones; None if the run only stages."""
        return arguments

    @abc.abstractmethod
    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        """Raise INVALID_ARGUMENT if the executable cannot run with these arguments."""

    @abc.abstractmethod
    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        """Return the program that runs the executable.

        Args:
          preserved: arguments that the program does not consume, of those in `donated`.
          completion: whether the program has more results, its completions.
          stream: the client's execution stream, for functions of colocated Python.
        """

    def run_on_host(
        self, cluster: ClusterSession, handles: Sequence[int], context: int, launch_id: int
    ) -> Coroutine[Any, Any, None] | None:
        """Run an executable that has no `program`, independently of the session's launches.

        `launch_id` is a number that the client passes with the run.
        Returns None if it has a program. Otherwise, makes the outputs under these handles, and returns a coroutine that
        waits for the run's end and raises its StatusError.
        """
        return None

    def awaited(self, handles: Sequence[int], completions: Sequence[int]) -> tuple[int, ...]:
        """Return the results of a run that are all complete only when the run has ended."""
        return tuple(completions)

    def metadata_reply(self) -> Any:
        """Return the reply with the layouts, shardings and memory kinds of the arguments and outputs."""
        return metadata_reply([spec.sharding.memory_kind for spec in self.outputs], sorted(self.donated))

    def mpmd_metadata(self, reply: Any) -> None:
        """Fill in the memory statistics of each fragment. Raises INVALID_ARGUMENT if there is only one mesh."""
        MPMD_ERROR.raise_if_error()

    async def mpmd_cost(self, cluster: ClusterSession, reply: Any) -> None:
        """Fill in XLA's estimates for each fragment. Raises StatusError."""
        MPMD_ERROR.raise_if_error()

    def output_sharding(self, position: int) -> Any:
        """Return the sharding of an output in the protocol's form."""
        spec = self.outputs[position]
        return sharding_to(spec.sharding, spec.shape, None)

    def output_replies(self, handles: Sequence[int]) -> list[Any]:
        """Return descriptions of the outputs for the reply to the first run."""
        return [
            executables_pb2.ExecuteReply.Output(
                dtype=codec.dtype_to(spec.dtype),
                shape={"dims": spec.shape},
                sharding=self.output_sharding(position),
                array=handle,
            )
            for position, (spec, handle) in enumerate(zip(self.outputs, handles, strict=True))
        ]

    @abc.abstractmethod
    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        """Fill in XLA's estimates. Raises StatusError."""

    @abc.abstractmethod
    async def text(self, cluster: ClusterSession) -> str:
        """Return the program in readable form. Raises StatusError."""


class ExecutableWithoutProgram(LoadedExecutable):
    """An executable that a session runs in its own way, without a program of the cluster.

    It takes no arguments unless a subclass takes them in `gather`, and refuses queries for its program.
    """

    def __init__(self, name: str, devices: tuple[int, ...], outputs: tuple[ArraySpec, ...] = ()) -> None:
        super().__init__()
        self.name = name
        self.devices = devices
        self.outputs = outputs

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        if arguments:
            raise invalid(f"a {self.name} executable takes no arguments, but {len(arguments)} were passed")

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        raise self._refusal()

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise self._refusal()

    async def text(self, cluster: ClusterSession) -> str:
        raise self._refusal()

    def _refusal(self) -> StatusError:
        return unimplemented(f"a {self.name} executable has no program")


class ImmediateReply:
    """The answer to a query of the plug-in, which is never run. Its fingerprint contains the answer.

    A plug-in program is the only request of jaxlib's client with arbitrary bytes, and the client takes the reply for an
    executable.
    """

    def __init__(self, name: str, devices: tuple[int, ...], content: bytes) -> None:
        self.name = name
        self.devices = devices
        self.fingerprint = content

    def unloaded(self, cluster: ClusterSession) -> None:
        """Called when the session has released the reply."""

    def metadata_reply(self) -> Any:
        reply = executables_pb2.ExecutableMetadataReply()
        for each in (
            reply.parameter_layouts_list,
            reply.output_layouts_list,
            reply.output_shardings,
            reply.donated_input_indices,
            reply.compiled_memory_stats,
        ):
            each.SetInParent()
        reply.output_memory_kinds.memory_kind_lists.add()
        return reply


# The objects with which a session replies to compile requests.
Loaded = LoadedExecutable | ImmediateReply


def compile_reply(loaded: Loaded, handle: int, ready_future: int) -> Any:
    """Return the reply to the request that has loaded `loaded`."""
    reply = executables_pb2.CompileReply(
        executable=handle,
        name=loaded.name,
        num_devices=len(loaded.devices),
        device_ids=loaded.devices,
        addressable_device_ids=loaded.devices,
        fingerprint_value=loaded.fingerprint,
        ready_future_handle=ready_future,
    )
    if isinstance(loaded, LoadedExecutable) and loaded.meshes is not None:
        reply.mpmd_addressable_devices.SetInParent()
        for name, devices in loaded.meshes.items():
            reply.mpmd_addressable_devices.devices[name].device_ids.extend(devices)
    return reply


def metadata_reply(memory_kinds: Sequence[str], donated: Sequence[int]) -> Any:
    """Return the metadata of an executable about whose functions the client can ask one by one."""
    reply = executables_pb2.ExecutableMetadataReply()
    reply.parameter_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
    reply.output_layouts_error.CopyFrom(codec.status_to(NO_LAYOUTS))
    kinds = reply.output_memory_kinds.memory_kind_lists.add()
    kinds.memory_kinds.extend(memory_kinds)
    reply.donated_input_indices.SetInParent()
    reply.donated_input_indices.donated_input_indices.extend(donated)
    no_stats = Status(Code.UNIMPLEMENTED, "memory statistics are only available for the functions of a program")
    reply.compiled_memory_stats_error.CopyFrom(codec.status_to(no_stats))
    reply.mpmd_compiled_memory_stats_error.CopyFrom(codec.status_to(MPMD_ERROR))
    return reply
