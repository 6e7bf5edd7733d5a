"""What processes say to one another: control messages, and the messages of jaxlib's IFRT proxy client."""
