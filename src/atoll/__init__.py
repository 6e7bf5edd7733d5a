"""Atoll: an open Pathways runtime for JAX. One controller, many accelerators, unmodified programs.

    JAX_PLATFORMS=atoll python train.py

runs any JAX script on an embedded cluster. `connect` does the same from Python; the command `atoll` starts
clusters that stay.
"""

from atoll import errors
from atoll._version import __version__
from atoll.client.connect import connect

__all__ = ["__version__", "connect", "errors"]
