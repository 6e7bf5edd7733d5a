"""A proxy for clients without Atoll: those that use Google's `pathwaysutils`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.cluster.directories import default_cache_directory, make_directory
from atoll.cluster.environment_variables import JOIN
from atoll.cluster.processes.child import END_SECONDS, Child, wait_for_any
from atoll.cluster.processes.process_runtime import end
from atoll.cluster.settings import ClusterSettings
from atoll.engines.engine_options import EngineOptions
from atoll.engines.start_engine import EngineProcess
from atoll.errors import AtollError, ClusterError, error_kind
from atoll.ifrt.proxy_options import ProxyOptions, Ready, start_proxy
from atoll.operate.cluster_registry import register_embedded
from atoll.security.join_token import JoinToken
from atoll.wire.address import Address

LABEL = "atoll proxy"


def client_environment(address: str) -> dict[str, str]:
    """Return the variables with which a script that uses Google's client connects to the proxy at `address`."""
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",  # otherwise jaxlib's client prints a stack trace at each normal exit
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": f"grpc://{address}",
    }


class Script:
    """A command of the user that runs while a proxy serves it, in the terminal of this process. Raises OSError."""

    who = "the command"

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(command, env=environment)

    def end(self) -> None:
        """End the command, with SIGKILL if it does not end within a few seconds."""
        end(self.process, END_SECONDS)


def run_proxy(
    listen: Address,
    cluster: str,
    settings: ClusterSettings,
    on_up: Callable[[str], Script | None],
    join: JoinToken | None = None,
    fail_on_loss: bool = False,
) -> int:
    """Run a proxy until a signal raises an exception here, and end all processes that this call started.

    `cluster` is an address, with a join token for TLS; "" starts a cluster with these `settings`, which ends with the
    proxy. With `fail_on_loss`, clients do not wait for failed islands. `on_up(address)` is called once the proxy
    listens. If it returns a script, the call ends with the script, and returns its exit status. Raises AtollError if a
    process of Atoll fails to start or exits early.
    """
    children: list[Child | Script] = []
    directory: Path | None = None
    try:
        if not cluster:
            directory = make_directory("proxy")
            options = EngineOptions(
                settings, str(directory), parent=os.getpid(), cache_directory=default_cache_directory()
            )
            engine = EngineProcess(options, "the embedded cluster")
            children.append(engine)
            register_embedded(directory, engine.address, settings.islands, settings.platform, engine.process.pid, LABEL)
            engine.wait_until_up()
            cluster = engine.address
        proxy = start_proxy(
            ProxyOptions(str(listen), cluster, os.getpid(), label=LABEL, patience=5.0, fail_on_loss=fail_on_loss),
            {JOIN.variable: str(join or "")},
        )
        children.append(proxy)
        ready = proxy.read(Ready)
        if ready.error:
            raise _error(ready, listen)
        script = on_up(ready.address)
        if script is not None:
            children.append(script)
        ended = wait_for_any(children)
        if script is not None and ended is script:
            return script.process.wait()
        raise ClusterError(f"{ended.who} has exited; see its messages above")
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
