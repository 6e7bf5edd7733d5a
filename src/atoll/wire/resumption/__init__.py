"""Control connections that survive the loss of their sockets and the replacement of the accepting process."""
