"""Bytes between processes: control connections, HTTP/2 and gRPC. Knows nothing of Atoll's messages."""
