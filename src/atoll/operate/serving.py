"""A proxy for clients that know nothing of Atoll: those of Google's `pathwaysutils`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from atoll.cluster.settings import ClusterSettings
from atoll.errors import AtollError, ClusterError, error_kind
from atoll.frontends.ifrt.options import ProxyOptions, Ready
from atoll.operate.engines.options import EngineOptions, Started, default_cache_directory, make_directory
from atoll.processes.child import Child, wait_for_any
from atoll.wire.address import Address


def serve_proxy(listen: Address, cluster: str, settings: ClusterSettings, on_up: Callable[[str], None]) -> None:
    """Runs a proxy until it ends, or a signal's exception comes through here; ends what it started.

    `cluster` "" starts a cluster of these `settings`, which ends with the proxy. `on_up(address)` is called once the
    proxy listens. Raises AtollError where something does not start, or ends by itself.
    """
    children: list[Child] = []
    directory = None
    try:
        if not cluster:
            directory = make_directory("proxy")
            engine = EngineOptions(
                settings, str(directory), parent=os.getpid(), cache_directory=default_cache_directory()
            )
            cluster = engine.controller_address
            children.append(Child("atoll.operate.engines.local", engine, "the embedded cluster"))
            started = children[0].read(Started)
            if started.error:
                raise ClusterError(started.error)
        options = ProxyOptions(str(listen), cluster, os.getpid(), label="atoll proxy", patience=5.0)
        children.append(Child("atoll.frontends.ifrt.main", options, "the proxy"))
        ready = children[-1].read(Ready)
        if ready.error:
            raise _error(ready, listen)
        on_up(ready.address)
        ended = wait_for_any(children)
        raise ClusterError(f"{ended.who} has ended; its messages are above")
    finally:
        for child in reversed(children):
            child.end()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _error(ready: Ready, listen: Address) -> AtollError:
    kind = error_kind(ready.error)
    if kind is not None:
        return kind(ready.message)
    return ClusterError(f"the proxy cannot listen at {listen}: {ready.message}")
