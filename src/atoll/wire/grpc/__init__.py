"""A gRPC server: unary and streaming calls, metadata, status, flow control and cancellation. Knows nothing of Atoll."""
