"""Starts a proxy. Everything that starts one does it here."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.cluster.processes.child import Child
from atoll.ifrt.proxy_options import ProxyOptions

# A proxy copies arrays and computes nothing. NumPy's BLAS starts a thread for each core but one all the same, which are
# at work for 50 ms before they sleep.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


def start_proxy(options: ProxyOptions, environment: Mapping[str, str]) -> Child:
    """A proxy's process, a child of this one, with `environment` beside this one's own; it says `Ready`."""
    return Child("atoll.ifrt.proxy_main", options, "the proxy", environment=_ENVIRONMENT | dict(environment))
