"""What a host agent gets of the environment in which the cluster was started, beside what its node has.

The only place that decides it: a secret goes the same way as the address of the controller, as an argument of an
actor's method, and not by Ray's runtime environments, which every user of the Ray cluster can read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_PREFIXES = ("ATOLL_", "XLA_", "NCCL_", "LIBTPU_", "TF_CPP_")
_NAMES = ("OMP_NUM_THREADS",)
# What was read where the cluster was started, and means something else on a host.
_NOT = ("ATOLL_ADDRESS", "ATOLL_ISLANDS", "ATOLL_ISLAND", "ATOLL_RANK", "ATOLL_ENGINE", "ATOLL_TOPOLOGY")


def agent_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that go along to every host agent, and to the engine."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _NOT and not name.startswith("ATOLL_RAY_") and (name.startswith(_PREFIXES) or name in _NAMES)
    }
