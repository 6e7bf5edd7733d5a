"""The one door to Ray: which versions do, how a process connects, and what is said where it cannot.

Ray is an extra. Nothing but this engine imports it, and that only here and in functions.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.engines.ray.bundles import Node
from atoll.errors import AtollError, ClusterError
from atoll.wire.address import Address, parse_address
from atoll.wire.sockets import dial

NAMESPACE = "atoll"
_OLDEST = (2, 60)
_PROBE_SECONDS = 5.0
_SCHEME = "ray://"


def connect(address: str) -> Any:
    """Connects this process to the Ray cluster at `address`, as a driver, and returns the module `ray`.

    "" is the cluster that RAY_ADDRESS names, or of which this machine is a node. Raises ClusterError.
    """
    ray = _module()
    if address not in ("", "auto", "local"):
        _probe(address)
    try:
        ray.init(address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises what comes: ConnectionError, RuntimeError, ValueError, AssertionError
        where = f"at {address}" if address else "here"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ClusterError(
            f"cannot connect to a Ray cluster {where}: {first} (start one with `ray start --head`; from a machine that "
            f"is no node of it, connect with --ray-address {_SCHEME}HOST:10001)"
        ) from None
    return ray


def _module() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ClusterError(f"the engine ray needs Ray: pip install 'atoll[ray]' ({error})") from None
    version = getattr(ray, "__version__", "0")
    if tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ClusterError(f"the engine ray needs Ray {oldest} or newer, and this is {version}")
    return ray


def _probe(address: str) -> None:
    """Ray itself takes minutes to say that nothing is there, or ends the process."""
    try:
        where = parse_address(address.removeprefix(_SCHEME))
        dial(where, what="Ray", timeout=_PROBE_SECONDS).close()
    except (AtollError, OSError) as error:
        raise ClusterError(
            f"there is no Ray cluster at {address}: {error} (expected HOST:PORT as `ray start --head` prints it, or "
            f"{_SCHEME}HOST:10001)"
        ) from None


def nodes(ray: Any) -> Sequence[Node]:
    """The nodes that Ray thinks alive."""
    free = ray._private.state.available_resources_per_node()
    leaving = draining(ray)
    return [
        Node(
            each["NodeManagerHostname"],
            each["Resources"],
            free.get(each["NodeID"], {}),
            dict(each.get("Labels") or {}),
            each["NodeID"] in leaving,
        )
        for each in ray.nodes()
        if each["Alive"]
    ]


def draining(ray: Any) -> Mapping[str, float]:
    """The ids of the nodes that Ray drains, of which a provider takes back the machine, say, and the seconds left.

    Ray places nothing there any more, and ends nothing: who drains the node does, when the time is over.
    """
    found: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    now = time.time()
    return {node: max(0.0, deadline / 1000 - now) if deadline else math.inf for node, deadline in found.items()}


def reachable(listens: Address, here: str) -> Address:
    """Where other nodes reach what listens on this one, which Ray knows by the address `here`."""
    return replace(listens, host=here) if listens.host in ("0.0.0.0", "::") else listens


def keep_sigterm() -> None:
    """For the main thread, after another has connected: takes back the handler of SIGTERM, which Ray has replaced.

    Ray's ends the process at once.
    """
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
