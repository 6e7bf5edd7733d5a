"""A gRPC server for asyncio: unary and streaming calls, metadata, status, flow control, cancellation.

The package imports nothing from the rest of Atoll and can be used separately.
"""

from atoll.grpc.call import Call
from atoll.grpc.grpc_server import GrpcServer, GrpcStatistics, Handler
from atoll.grpc.http2.http2_limits import Limits
from atoll.grpc.status import GrpcError, StatusCode

__all__ = ["Call", "GrpcError", "GrpcServer", "GrpcStatistics", "Handler", "Limits", "StatusCode"]
