"""Bytes between processes: addresses, sockets, TLS, framing and control connections, independent of their messages."""
