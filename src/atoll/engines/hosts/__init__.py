"""The engine for machines that have a host agent each, and which somebody else starts."""
