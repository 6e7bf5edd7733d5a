"""Validation of messages from the cluster's own processes and from operators' commands.

Workers, relays, host agents and the engine are trusted: an invalid message from them comes from another version of
Atoll or from a bug. A command receives the violation as its reply.
"""

from __future__ import annotations
