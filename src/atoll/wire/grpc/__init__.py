"""A gRPC server for asyncio: unary and streaming calls, metadata, status, flow control, cancellation.

It depends on `atoll.wire.http2` alone and can be used without the rest of Atoll.
"""

from atoll.wire.grpc.call import Call
from atoll.wire.grpc.server import GrpcServer, GrpcStatistics, Handler
from atoll.wire.grpc.status import GrpcError, StatusCode
from atoll.wire.http2.limits import Limits

__all__ = ["Call", "GrpcError", "GrpcServer", "GrpcStatistics", "Handler", "Limits", "StatusCode"]
