"""The protocols between processes: control messages, and the messages of jaxlib's IFRT proxy client."""
