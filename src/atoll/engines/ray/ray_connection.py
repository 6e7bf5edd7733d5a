"""The connection of a process to Ray.

Ray is an optional dependency: only this engine imports it, inside functions.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from atoll.engines.ray.bundles import Node
from atoll.errors import AtollError, ClusterError
from atoll.wire.address import Address, parse_address
from atoll.wire.sockets import dial

NAMESPACE = "atoll"
_OLDEST = (2, 60)
_PROBE_SECONDS = 5.0
_SCHEME = "ray://"


def connect(address: str) -> Any:
    """Connect this process to the Ray cluster at `address` as a driver, and return the module `ray`.

    "" is the cluster that RAY_ADDRESS names, or that this machine is a node of. Raise ClusterError on failure.
    """
    ray = _module()
    if address not in ("", "auto", "local"):
        _probe(address)
    try:
        ray.init(address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # such as ConnectionError, RuntimeError, ValueError, AssertionError
        where = f"at {address}" if address else "here"
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ClusterError(
            f"cannot connect to a Ray cluster {where}: {first} (start one with `ray start --head`; from a machine that "
            f"is not a node of it, connect with --ray-address {_SCHEME}HOST:10001)"
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
        raise ClusterError(f"the engine ray needs Ray {oldest} or newer, but Ray {version} is installed")
    return ray


def _probe(address: str) -> None:
    """Raise ClusterError if nothing listens at `address`. Ray takes minutes to report that, or ends the process."""
    try:
        where = parse_address(address.removeprefix(_SCHEME))
        dial(where, what="Ray", timeout=_PROBE_SECONDS).close()
    except (AtollError, OSError) as error:
        raise ClusterError(
            f"there is no Ray cluster at {address}: {error} (expected HOST:PORT as `ray start --head` prints it, or "
            f"{_SCHEME}HOST:10001)"
        ) from None


def nodes(ray: Any) -> Sequence[Node]:
    """Return the nodes that Ray considers alive."""
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
    """Return the seconds left for each node that Ray drains, by node id; `math.inf` without a deadline.

    A node is drained, for example, when a cloud provider reclaims its machine. Ray places nothing there any more and
    ends nothing: the provider does that at the deadline.
    """
    found: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    now = time.time()
    return {node: max(0.0, deadline / 1000 - now) if deadline else math.inf for node, deadline in found.items()}


def reachable(listens: Address, here: str) -> Address:
    """Return the address for other nodes to reach a listener on this node, whose address in Ray is `here`."""
    return replace(listens, host=here) if listens.host in ("0.0.0.0", "::") else listens


def keep_sigterm() -> None:
    """Restore the handler of SIGTERM after another thread has connected. Call this on the main thread.

    Ray replaces the handler with one that ends the process at once.
    """
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
