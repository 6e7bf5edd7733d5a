"""An IFRT proxy that answers each request at once, without a cluster: what remains is the time of jaxlib's client.

It has one device. An executable returns its argument, and an array is the bytes that the client has sent. Requests
that the benchmark does not need fail with UNIMPLEMENTED. It listens on a unix socket, as Atoll's proxies of local
scripts do, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from typing import Any

from atoll.cluster.virtual_devices import DeviceInfo, VirtualDevice
from atoll.errors import OK, Code, StatusError, unimplemented
from atoll.executables.loaded_executable import ExecutableWithoutProgram, compile_reply
from atoll.grpc import Call, GrpcServer
from atoll.ifrt.buffer_service import BufferService, unary
from atoll.ifrt.host_buffer_store import HostBuffers, StoredUpload
from atoll.ifrt.ifrt_service import MAX_PROTOCOL, MAX_SERDES, SERVICE
from atoll.ifrt.ifrt_session import FIRST_MINTED_HANDLE, ResponseStream
from atoll.ifrt.requests.value_requests import init_reply
from atoll.ir.types import ArraySpec
from atoll.protocol.ifrt import executables_pb2, session_pb2, transport_pb2
from atoll.protocol.messages import Welcome
from atoll.protocol.translation import codec
from atoll.protocol.translation.array_specs import spec_from
from atoll.protocol.translation.shardings import sharding_from, sharding_to

_SESSION = 1
_DEVICE = VirtualDevice(0, 0, 0, DeviceInfo(0, "cpu", "cpu", ("device",), "device", (), 0, 0, 0))
_WELCOME = Welcome(1, "", (_DEVICE,), (), "cpu", "", 1)
# Kinds of requests whose responses jaxlib's client never finishes: see `ResponseStream`.
_OUT_OF_SEQUENCE = ("init", "destruct_array", "delete_array")


class _Contents:
    """The contents of an array, which may arrive on another stream after the requests that use the array."""

    def __init__(self) -> None:
        self.value = b""
        self._has_arrived = False
        self._waiting: list[Callable[[], None]] = []

    def arrived(self, stored: Any) -> None:
        self.value, self._has_arrived = b"".join(bytes(part) for part in stored.contents), True
        for call in self._waiting:
            call()
        self._waiting.clear()

    def when_arrived(self, call: Callable[[], None]) -> None:
        """Call now, or when the contents arrive."""
        if self._has_arrived:
            call()
        else:
            self._waiting.append(call)


class InstantSession:
    """The arrays of the one client, and the answers to its requests. `write` sends a response."""

    def __init__(self, buffers: HostBuffers, write: Callable[[bytes], None]) -> None:
        self._buffers = buffers
        self._responses = ResponseStream(write, lambda op: None)
        self._minted = itertools.count(FIRST_MINTED_HANDLE)
        self._specs: dict[int, ArraySpec] = {}
        self._contents: dict[int, _Contents] = {}

    def handle(self, data: bytes | memoryview) -> None:
        request = codec.parse(session_pb2.Request, bytes(data))
        kind = request.WhichOneof("kind")
        if kind == "copy_to_host_buffer":
            self._contents[request.copy_to_host_buffer.array].when_arrived(lambda: self._respond(request, kind))
        else:
            self._respond(request, kind)

    def _respond(self, request: Any, kind: str) -> None:
        response = session_pb2.Response()
        response.meta.op_id = request.meta.op_id
        try:
            answer = getattr(self, f"_{kind}", None)
            if answer is None:
                raise unimplemented(f"the proxy of the benchmark has no {kind}")
            answer(getattr(request, kind), response)
        except StatusError as error:
            response.meta.status.CopyFrom(codec.status_to(error.status))
        if kind in _OUT_OF_SEQUENCE or response.meta.HasField("status"):
            self._responses.send_out_of_sequence(response, request.meta.user_context_id)
        else:
            self._responses.send(response, request.meta.user_context_id)

    # ---- answers, by the kind of the request

    def _init(self, request: Any, response: Any) -> None:
        response.init.CopyFrom(init_reply(_WELCOME, _SESSION))

    def _compile(self, request: Any, response: Any) -> None:
        loaded = ExecutableWithoutProgram("identity", (0,))
        response.compile.CopyFrom(compile_reply(loaded, next(self._minted), next(self._minted)))

    def _executable_metadata(self, request: Any, response: Any) -> None:
        reply = response.executable_metadata
        reply.CopyFrom(ExecutableWithoutProgram("identity", (0,)).metadata_reply())
        reply.output_memory_kinds.memory_kind_lists[0].memory_kinds.append("device")

    def _execute(self, request: Any, response: Any) -> None:
        given = list(request.results)
        results = given or [next(self._minted) for _ in request.arguments]
        reply = response.execute
        reply.SetInParent()
        for argument, result in zip(request.arguments, results, strict=True):
            spec = self._specs[result] = self._specs[argument]
            self._contents[result] = self._contents[argument]
            if not given:
                reply.outputs.append(
                    executables_pb2.ExecuteReply.Output(
                        dtype=codec.dtype_to(spec.dtype),
                        shape={"dims": spec.shape},
                        sharding=sharding_to(spec.sharding, spec.shape, None),
                        array=result,
                    )
                )
        if request.options.fill_status:
            reply.status_handle = request.status_handle or next(self._minted)

    def _fetch_execute_result(self, request: Any, response: Any) -> None:
        response.fetch_execute_result.SetInParent()

    def _executable_destruct(self, request: Any, response: Any) -> None:
        response.executable_destruct.SetInParent()

    def _make_array_from_host_buffer(self, request: Any, response: Any) -> None:
        shape = codec.shape_from(request.shape)
        spec = ArraySpec(codec.dtype_from(request.dtype), shape, sharding_from(request.sharding, shape))
        array = request.array if request.HasField("array") else next(self._minted)
        self._make(array, spec, request.host_buffer)
        response.make_array_from_host_buffer.array = array

    def _make_arrays_from_host_buffer_shards(self, request: Any, response: Any) -> None:
        arrays = list(request.arrays) or [next(self._minted) for _ in request.specs]
        for array, each in zip(arrays, request.specs, strict=True):
            (buffer,) = each.host_buffers
            self._make(array, spec_from(each.array_spec), buffer.host_buffer)
        response.make_arrays_from_host_buffer_shards.arrays.extend(arrays)

    def _make(self, array: int, spec: ArraySpec, buffer: int) -> None:
        self._specs[array] = spec
        self._contents[array] = _Contents()
        self._buffers.consume(buffer, self._contents[array].arrived)

    def _copy_to_host_buffer(self, request: Any, response: Any) -> None:
        contents = self._contents[request.array].value
        self._buffers.put(request.host_buffer, StoredUpload([contents], len(contents)))
        response.copy_to_host_buffer.SetInParent()

    def _disassemble_into_single_device_arrays(self, request: Any, response: Any) -> None:
        (shard,) = request.results or [next(self._minted)]
        self._specs[shard] = self._specs[request.array]
        self._contents[shard] = self._contents[request.array]
        response.disassemble_into_single_device_arrays.arrays.append(shard)

    def _fully_replicated_shard(self, request: Any, response: Any) -> None:
        shard = request.result or next(self._minted)
        self._specs[shard] = self._specs[request.array]
        self._contents[shard] = self._contents[request.array]
        response.fully_replicated_shard.array = shard

    def _check_value_ready(self, request: Any, response: Any) -> None:
        response.check_value_ready.SetInParent()

    def _check_future(self, request: Any, response: Any) -> None:
        response.check_future.SetInParent()

    def _destruct_array(self, request: Any, response: Any) -> None:
        for array in request.arrays:
            self._specs.pop(array, None)
            self._contents.pop(array, None)
        response.destruct_array.SetInParent()

    def _delete_array(self, request: Any, response: Any) -> None:
        response.delete_array.deletion_future_handle = next(self._minted)

    def _is_array_deleted(self, request: Any, response: Any) -> None:
        response.is_array_deleted.deleted = False


class InstantService:
    """The methods of the proxy's service for one client."""

    def __init__(self) -> None:
        self._host_buffers = HostBuffers()
        self._buffers = BufferService(lambda number: self._host_buffers)

    def methods(self) -> dict[str, Callable[[Call], None]]:
        return {
            SERVICE + "GetVersion": unary(transport_pb2.GetVersion, _version),
            SERVICE + "IfrtSession": self._session,
            **{SERVICE + name: method for name, method in self._buffers.methods().items()},
        }

    def _session(self, call: Call) -> None:
        session = InstantSession(self._host_buffers, call.send)
        call.set_handlers(session.handle, lambda: call.finish(OK.code, ""))


def _version(request: Any) -> Any:
    highest = request.max_version
    if request.min_version.protocol_version > MAX_PROTOCOL:
        raise StatusError(Code.FAILED_PRECONDITION, "this jaxlib is newer than Atoll")
    reply = transport_pb2.GetVersionReply()
    reply.version.protocol_version = min(highest.protocol_version, MAX_PROTOCOL)
    reply.version.ifrt_serdes_version_number = min(highest.ifrt_serdes_version_number, MAX_SERDES)
    return reply


async def serve(path: str) -> None:
    server = GrpcServer(InstantService().methods())
    await server.listen_unix(path)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
