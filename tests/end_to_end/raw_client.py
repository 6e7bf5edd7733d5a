"""A client of the proxy without JAX.

It sends hand-made messages of the IFRT proxy protocol over grpcio, valid or not.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import grpc

from atoll.ifrt.buffer_service import STORE_HEADER
from atoll.ifrt.ifrt_service import SERVICE, SESSION_HEADER
from atoll.protocol.ifrt import session_pb2, shardings_pb2, transport_pb2, values_pb2

ANSWER_SECONDS = 300.0
Status = tuple[int, str]


def _as_it_is(data: bytes) -> bytes:
    return data


class RawClient:
    """Channel to a proxy, with at most one session."""

    def __init__(self, address: str, protocol: int = 25, serdes: int = 3) -> None:
        self.channel = grpc.insecure_channel(address)
        self._protocol, self._serdes = protocol, serdes
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call: Any = None
        self._next_op = 0
        self.session_id = 0

    def close(self) -> None:
        self._requests.put(None)
        self.channel.close()

    # ---- the session

    def open(self) -> Any:
        """Open a session, and return the reply to its first request."""
        status, reply = self._begin()
        assert status == (0, ""), status
        self.session_id = reply.init.session_id
        return reply.init

    def begin(self) -> Status:
        """Return the status with which a session opens."""
        return self._begin()[0]

    def _begin(self) -> tuple[Status, Any]:
        metadata = transport_pb2.SessionMetadata()
        metadata.version.protocol_version = self._protocol
        metadata.version.ifrt_serdes_version_number = self._serdes
        method = self.channel.stream_stream(SERVICE + "IfrtSession", _as_it_is, _as_it_is)
        self._call = method(iter(self._requests.get, None), metadata=((SESSION_HEADER, metadata.SerializeToString()),))
        try:
            reply = self.ask(lambda request: request.init.SetInParent())
        except grpc.RpcError as error:
            return (error.code().value[0], error.details()), None
        return (reply.meta.status.code, reply.meta.status.message), reply

    def send(self, data: bytes) -> None:
        """Send bytes as one message of the session's stream."""
        self._requests.put(data)

    def request(self, fill: Callable[[Any], Any]) -> Any:
        request = session_pb2.Request()
        self._next_op += 1
        request.meta.op_id = self._next_op
        fill(request)
        return request

    def ask(self, fill: Callable[[Any], Any]) -> Any:
        """Return the reply to a request that `fill` completes. Raise grpc.RpcError if the session ends instead."""
        request = self.request(fill)
        self.send(request.SerializeToString())
        return self.answer(request.meta.op_id)

    def answer(self, op: int) -> Any:
        while True:
            response = session_pb2.Response.FromString(next(self._call))
            if response.meta.op_id == op:
                return response

    def status(self, fill: Callable[[Any], Any]) -> Status:
        """Return the status of the reply to a request, or of the end of the session."""
        try:
            status = self.ask(fill).meta.status
        except grpc.RpcError as error:
            return error.code().value[0], error.details()
        return status.code, status.message

    def end(self) -> Status:
        """Return the status with which the session ends, after waiting for the end."""
        try:
            while True:
                next(self._call)
        except StopIteration:
            return 0, ""
        except grpc.RpcError as error:
            return error.code().value[0], error.details()

    # ---- outside of the session

    def unary(self, method: str, request: Any) -> Status:
        return self.unary_bytes(method, request.SerializeToString())

    def unary_bytes(self, method: str, data: bytes) -> Status:
        try:
            self.channel.unary_unary(SERVICE + method, _as_it_is, _as_it_is)(data, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return error.code().value[0], error.details()
        return 0, ""

    def store(self, handle: int, contents: bytes, size: int | None = None) -> Status:
        """Send a host buffer, whose size may differ from the announced one."""
        metadata = transport_pb2.HostBufferStoreMetadata(
            session_id=self.session_id, handle=handle, buffer_size=len(contents) if size is None else size
        )
        message = transport_pb2.HostBufferStore(data=contents).SerializeToString()
        return self.store_messages(metadata.SerializeToString(), [message])

    def store_messages(self, metadata: bytes, messages: list[bytes]) -> Status:
        method = self.channel.stream_unary(SERVICE + "HostBufferStore", _as_it_is, _as_it_is)
        try:
            method(iter(messages), metadata=((STORE_HEADER, metadata),), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return error.code().value[0], error.details()
        return 0, ""

    def get_version(self, low: int, high: int) -> Status:
        request = transport_pb2.GetVersion()
        request.min_version.protocol_version = low
        request.max_version.protocol_version = high
        request.max_version.ifrt_serdes_version_number = 3
        return self.unary("GetVersion", request)


def sharding(type_name: str, message: Any) -> Any:
    return values_pb2.Sharding(
        serialized_sharding=values_pb2.Serialized(type_name=f"xla::ifrt::{type_name}", data=message.SerializeToString())
    )


def on_device(device: int) -> Any:
    return sharding("SingleDeviceSharding", shardings_pb2.SingleDeviceSharding(device_id=device))
