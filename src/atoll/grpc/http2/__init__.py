"""The server half of HTTP/2, as far as gRPC needs it."""
