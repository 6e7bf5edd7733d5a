"""Requests of operators, and what they are shown."""
