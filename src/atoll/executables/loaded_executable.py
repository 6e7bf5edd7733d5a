"""What a session can run by a handle, and what JAX queries of it: the seam of executables.

Compiled functions, traced programs, staged arguments and slices are its kinds. All methods run on the session's loop.
"""

from __future__ import annotations

import abc
from collections.abc import Coroutine, Sequence
from typing import Any

from atoll.errors import OK, Code, Status, StatusError, invalid
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Program
from atoll.ir.types import ArraySpec
from atoll.protocol.ifrt import executables_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.shardings import sharding_to
from atoll.session.cluster_session import ClusterSession

NO_LAYOUTS = Status(Code.UNIMPLEMENTED, "XLA reports no layouts where there are tokens among the arrays")
MPMD_ERROR = Status(Code.INVALID_ARGUMENT, "this executable runs on one mesh: it is no MPMD executable")


class LoadedExecutable(abc.ABC):
    """What a session can run by a handle: a compiled function, or a program of several.

    `functions` are those that the session keeps for as long as it has this, each once. A run may also give completions,
    which are no arrays: they come after `outputs`.
    """

    name: str
    devices: tuple[int, ...]
    fingerprint = b""  # names it to programs of the same session
    functions: tuple[int, ...] = ()
    outputs: tuple[ArraySpec, ...] = ()
    donated: frozenset[int] = frozenset()
    callbacks: tuple[int, ...] = ()  # the client's numbers for what it calls in the client's process
    has_streams = False  # whether it matters in which stream it runs: devices have an order of their own
    loss = OK  # why it cannot run any more: what its runs give

    def __init__(self) -> None:
        # The registered programs that run it and how many completions they give, by what the caller keeps, whether it
        # asks for the run's status, and the run's stream.
        self.programs: dict[tuple[frozenset[int], bool, int], tuple[int, int]] = {}

    def unloaded(self, cluster: ClusterSession) -> None:
        """The session has released it."""
        return None

    def gather(self, staged: list[int], arguments: list[int]) -> list[int] | None:
        """The handles of all arguments of a run, of which some may be staged; None where this was staging only."""
        return arguments

    @abc.abstractmethod
    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        """Raises INVALID_ARGUMENT where it cannot be run on these."""

    @abc.abstractmethod
    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        """The program that runs it; the caller keeps the `preserved` of `donated`."""

    def run_on_host(
        self, cluster: ClusterSession, handles: Sequence[int], context: int
    ) -> Coroutine[Any, Any, None] | None:
        """Runs it beside the session's launches, where it has no `program`; None where it has one.

        Has the outputs made under these handles, and returns what waits for the run's end, and raises its StatusError.
        """
        return None

    def awaited(self, handles: Sequence[int], completions: Sequence[int]) -> tuple[int, ...]:
        """Which of a run's results show, together, that it has ended."""
        return tuple(completions)

    @abc.abstractmethod
    def metadata_reply(self) -> Any: ...

    def output_sharding(self, position: int) -> Any:
        """The sharding of an output in the protocol's form."""
        spec = self.outputs[position]
        return sharding_to(spec.sharding, spec.shape, None)

    def output_replies(self, handles: Sequence[int]) -> list[Any]:
        """The outputs as the first run describes them."""
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
        """Fills in XLA's estimates. Raises StatusError."""

    @abc.abstractmethod
    async def text(self, cluster: ClusterSession) -> str:
        """What it looks like, for people. Raises StatusError."""

    def compile_reply(self, handle: int, ready_future: int) -> Any:
        return executables_pb2.CompileReply(
            executable=handle,
            name=self.name,
            num_devices=len(self.devices),
            device_ids=self.devices,
            addressable_device_ids=self.devices,
            fingerprint_value=self.fingerprint,
            ready_future_handle=ready_future,
        )


class ImmediateExecutable(LoadedExecutable):
    """Bytes for the client, and the devices that they are about: to JAX an executable, which is never run.

    A plug-in program is the one request of jaxlib's client that carries any bytes, and an executable is its only reply.
    The executable's fingerprint carries the answer.
    """

    def __init__(self, name: str, devices: tuple[int, ...], content: bytes) -> None:
        super().__init__()
        self.name = name
        self.devices = devices
        self.fingerprint = content

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        raise self._not_run()

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        raise self._not_run()

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        raise self._not_run()

    async def text(self, cluster: ClusterSession) -> str:
        raise self._not_run()

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

    def _not_run(self) -> StatusError:
        return invalid(f"{self.name} is no program: it cannot be run")
