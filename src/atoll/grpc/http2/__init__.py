"""The server half of HTTP/2, limited to the features that gRPC needs."""
