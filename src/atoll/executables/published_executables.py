"""The executable that returns the arrays of open versions of published arrays."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from atoll.errors import Status, invalid
from atoll.executables.loaded_executable import ExecutableWithoutProgram
from atoll.executables.program_checks import op_sharding
from atoll.protocol.translation.shardings import sharding_to
from atoll.protocol.version_requests import READER_OF_RUN, ReadArrays
from atoll.session.cluster_session import ClusterSession


class ReadExecutable(ExecutableWithoutProgram):
    """Makes the arrays of open versions on the session's devices. The constructor raises INVALID_ARGUMENT."""

    def __init__(self, request: ReadArrays, cluster: ClusterSession) -> None:
        for target in request.targets:
            cluster.hosts_of(target.sharding.devices)
            if not target.sharding.devices:
                raise invalid("a published array is read to one or more devices")
        super().__init__("subscribe", request.targets[0].sharding.devices, request.targets)
        self._request = request

    def run_on_host(
        self, cluster: ClusterSession, handles: Sequence[int], context: int, launch_id: int
    ) -> Coroutine[Any, Any, None]:
        request = self._request
        reader = launch_id if request.reader == READER_OF_RUN else request.reader
        if reader < 0:
            raise invalid(f"the launch_id of a run that reads published arrays is {reader}, not the number of a reader")
        cluster.read_version(reader, self.outputs, handles, request.first, request.is_original)
        ended = cluster.make_future()
        cluster.wait(handles, ended.set_result)

        async def work() -> None:
            status: Status = await ended
            status.raise_if_error()

        return work()

    def output_sharding(self, position: int) -> Any:
        spec = self.outputs[position]
        return sharding_to(spec.sharding, spec.shape, op_sharding(spec))

    async def text(self, cluster: ClusterSession) -> str:
        return f"a read of {len(self.outputs)} published arrays"
