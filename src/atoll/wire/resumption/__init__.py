"""Control connections that outlive their sockets, and the process at their other end."""
