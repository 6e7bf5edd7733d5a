"""pathwaysutils' resharding (`pathwaysutils.experimental.reshard`): a plugin program in JSON.

The request contains the shardings. The arguments of the first run determine dtypes and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.errors import invalid
from atoll.executables.json_requests import beginnings, read_request
from atoll.executables.loaded_executable import LoadedExecutable, metadata_reply
from atoll.executables.program_executables import ProgramExecutable
from atoll.executables.session_arrays import ArrayRecord
from atoll.ir.program import Program, Transfer
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol.ifrt import xla_pb2
from atoll.protocol.translation import codec
from atoll.protocol.translation.shardings import tiling_from
from atoll.quantities import counted
from atoll.session.cluster_session import ClusterSession


class _Devices(msgspec.Struct, frozen=True):
    device_ids: tuple[int, ...]


class _Sharding(msgspec.Struct, frozen=True):
    devices: _Devices
    xla_hlo_sharding: bytes  # an OpSharding, in base64
    memory_kind: str = ""

    def of(self, spec: ArraySpec) -> ArraySpec:
        """Return `spec` with this sharding."""
        devices = self.devices.device_ids
        op = codec.parse(xla_pb2.OpSharding, self.xla_hlo_sharding)
        tiling = tiling_from(op, len(devices), spec.shape)
        return ArraySpec(spec.dtype, spec.shape, Sharding(devices, tiling, self.memory_kind))


class _Reshard(msgspec.Struct, frozen=True, rename="camel"):
    in_sharding: tuple[_Sharding, ...]
    out_sharding: tuple[_Sharding, ...]
    donate_input: bool = False


class _Request(msgspec.Struct, frozen=True, rename="camel"):
    reshard_request: _Reshard


RESHARD_REQUESTS = beginnings(_Request)


class ReshardExecutable(LoadedExecutable):
    """Changes the shardings of arrays. The constructor raises INVALID_ARGUMENT."""

    def __init__(self, payload: bytes, cluster: ClusterSession) -> None:
        super().__init__()
        self._request = read_request(_Request, payload, "reshardRequest").reshard_request
        sources, targets = self._request.in_sharding, self._request.out_sharding
        if not sources or len(sources) != len(targets):
            raise invalid(f"a reshardRequest has {len(sources)} input shardings and {len(targets)} output shardings")
        cluster.hosts_of([device for each in (*sources, *targets) for device in each.devices.device_ids])
        self._cluster = cluster
        self._program: ProgramExecutable | None = None
        self.name = "reshard"
        self.devices = sources[0].devices.device_ids  # jaxlib's client requires as many as the arguments' shards

    def check(self, arguments: Sequence[ArrayRecord]) -> None:
        if self._program is None:
            self._program = self._made_for(arguments)
            self.outputs, self.donated = self._program.outputs, self._program.donated
        self._program.check(arguments)

    def _made_for(self, arguments: Sequence[ArrayRecord]) -> ProgramExecutable:
        request = self._request
        specs = [record.spec for record in arguments if record.spec is not None]
        if len(specs) != len(request.in_sharding) or len(specs) != len(arguments):
            raise invalid(f"a reshardRequest for {counted(len(request.in_sharding), 'array')} got {len(arguments)}")
        sources = tuple(each.of(spec) for each, spec in zip(request.in_sharding, specs, strict=True))
        targets = tuple(each.of(spec) for each, spec in zip(request.out_sharding, specs, strict=True))
        values = tuple(range(len(specs)))
        node = Transfer(values, targets, request.donate_input, reshard=True)
        program = Program(self.name, sources, (node,), tuple(len(specs) + value for value in values))
        return ProgramExecutable(program, [], self._cluster)

    def _known(self) -> ProgramExecutable:
        if self._program is None:
            raise invalid("a reshardRequest has no program before its first run, which determines the array types")
        return self._program

    def program(self, preserved: frozenset[int], completion: bool, stream: int) -> Program:
        return self._known().program(preserved, completion, stream)

    def awaited(self, handles: Sequence[int], completions: Sequence[int]) -> tuple[int, ...]:
        return self._known().awaited(handles, completions)

    def output_sharding(self, position: int) -> Any:
        return self._known().output_sharding(position)

    def metadata_reply(self) -> Any:
        request = self._request
        donated = range(len(request.in_sharding)) if request.donate_input else ()
        return metadata_reply([each.memory_kind for each in request.out_sharding], donated)

    async def cost(self, cluster: ClusterSession, reply: Any) -> None:
        await self._known().cost(cluster, reply)

    async def text(self, cluster: ClusterSession) -> str:
        return await self._known().text(cluster)
