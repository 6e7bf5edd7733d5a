"""Starts proxies. Holds the options of a proxy process, and its report that it is ready."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import msgspec

from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.processes.child import Child

# Lets the proxy of a client answer all compile requests under way with an error.
END_COMPILATIONS = signal.SIGUSR2


class ProxyOptions(msgspec.Struct, frozen=True):
    """The options of a proxy process.

    If `client` is set, the proxy serves only that process: it opens the session at once, reports over `ready_fd`
    whether that worked and later whether the session is lost, and ends with the client's session.
    """

    listen: str
    controller: str
    parent: int  # pid; the proxy ends with this process
    label: str = ""
    client: int = 0  # pid
    directory: str = ""  # the client's directory with this proxy's socket; removed at the end
    transfer_directory: str = ""  # shared with the client for large arrays; removed at the end
    fail_on_loss: bool = False  # whether launches on a failed island fail, instead of waiting for its restart
    run: NamedRun = UNNAMED
    losses: str = ""  # path of a file that grows by a byte whenever hosts fail, so that the client notices
    ready_fd: int = -1
    patience: float = 60.0  # seconds for which to retry a controller that is still starting


class Ready(msgspec.Struct, frozen=True):
    """A proxy's report that it listens at `address`, or that it failed."""

    address: str = ""
    error: str = ""  # the name of a class in `atoll.errors`
    message: str = ""


class SessionLost(msgspec.Struct, frozen=True):
    """The second report of a proxy with one client: the session is lost, and the client is about to get errors."""


# A proxy computes nothing, but NumPy's BLAS would start one thread per core, which spin for 50 ms before they sleep.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


def start_proxy(options: ProxyOptions, environment: Mapping[str, str]) -> Child:
    """Start a proxy as a child process, with `environment` added to this process's. It reports `Ready`."""
    return Child("atoll.ifrt.proxy_main", options, "the proxy", environment=_ENVIRONMENT | dict(environment))
