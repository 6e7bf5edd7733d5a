"""Logical buffers, and the memory that they take on devices."""
