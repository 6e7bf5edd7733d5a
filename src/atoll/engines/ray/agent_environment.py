"""What the engine and host agents get of the environment in which a cluster was started, beside what their node has.

The only place that decides it: a secret goes the same way as the address of the controller, as an argument of an
actor's method, and not by Ray's runtime environments, which every user of the Ray cluster can read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from atoll.security.access import HOST_TOKEN_VARIABLE, INSECURE_VARIABLE, TOKEN_VARIABLE
from atoll.security.join_token import JOIN_VARIABLE
from atoll.security.start_security import AUTHORITY_VARIABLE

_PREFIXES = ("ATOLL_", "XLA_", "NCCL_", "LIBTPU_", "TF_CPP_")
_NAMES = ("OMP_NUM_THREADS",)
# What was read where the cluster was started, and means something else on a host.
_NOT = (
    "ATOLL_ADDRESS",
    "ATOLL_ISLANDS",
    "ATOLL_ISLAND",
    "ATOLL_RANK",
    "ATOLL_ENGINE",
    "ATOLL_TOPOLOGY",
    INSECURE_VARIABLE,
)
_SECRETS = (JOIN_VARIABLE, TOKEN_VARIABLE, HOST_TOKEN_VARIABLE, AUTHORITY_VARIABLE)


def engine_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that go along to the engine: of secrets, what its cluster is to be made with."""
    return _chosen(environment, (TOKEN_VARIABLE, HOST_TOKEN_VARIABLE, AUTHORITY_VARIABLE))


def agent_environment(secured: bool, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that go along from the engine to every host agent.

    Of secrets, what a host joins by: the join token that the engine has made for hosts; without TLS, the tokens.
    """
    return _chosen(environment, (JOIN_VARIABLE,) if secured else (TOKEN_VARIABLE, HOST_TOKEN_VARIABLE))


def _chosen(environment: Mapping[str, str], secrets: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and name not in _NOT
        and not name.startswith("ATOLL_RAY_")
        and (name in secrets or name not in _SECRETS)
    }
