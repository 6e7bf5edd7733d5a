"""(s), (t): the cost of TLS, for 64 MB from island to island and for one launch, over TCP on loopback.

The cluster listens on all interfaces, so that its data ports also use TCP. The peer of the bytes is `ssl.SSLSocket`,
blocking, between two threads of one process; that of the launch is the same cluster without TLS.
"""

import os
import socket
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from atoll.cluster.settings import ClusterSettings
from atoll.engines.engine_options import EngineOptions
from atoll.engines.start_engine import EngineProcess
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.join_token import join_file
from atoll.security.roles import Role
from atoll.wire.tls.identity import Identity, server_name
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.islands import LARGE_BYTES, island_copy, socket_copy

TLS = "atoll, TLS"


def copy_between(settings: Settings) -> Round:
    """64 MB from one island's device to the other's."""
    repeats = settings.size(full=7, quick=3)
    if settings.system == TLS:
        start_cluster(tls=True)
        move = island_copy()
    else:
        move = _socket_copy()

    def measure() -> dict[str, float]:
        return {"rate": LARGE_BYTES / 1e9 / statistics.median(move() for _ in range(repeats))}

    measure()
    return measure


def launch(settings: Settings) -> Round:
    """x = f(x), each waited for: the median of a round."""
    calls = settings.size(full=500, quick=100)
    start_cluster(tls=settings.system == TLS)
    add_one = jax.jit(lambda x: x + 1.0)
    zero = jax.device_put(jnp.zeros(8, jnp.float32), jax.devices()[0])

    def measure() -> dict[str, float]:
        x, durations = zero, []
        for _ in range(calls):
            started = time.perf_counter()
            x = add_one(x).block_until_ready()
            durations.append(time.perf_counter() - started)
        if float(np.asarray(x)[0]) != calls:
            raise ArithmeticError(f"{calls} additions of one made {np.asarray(x)}")
        return {"launch": 1e6 * statistics.median(durations)}

    measure()
    return measure


def start_cluster(tls: bool) -> None:
    """One of two islands, which ends with this process; JAX, which has not begun, will run on it."""
    directory = tempfile.mkdtemp(prefix="atoll-bench-")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scheme, secrets = ("tls://", {}) if tls else ("", {"ATOLL_TOKEN": os.urandom(16).hex()})
    options = EngineOptions(
        ClusterSettings("2x1x1"), directory, f"{scheme}0.0.0.0:{port}", advertise="127.0.0.1", parent=os.getpid()
    )
    EngineProcess(options, "the cluster to be measured", environment=secrets).wait_until_up()
    os.environ.update(secrets)
    if tls:
        os.environ["ATOLL_JOIN"] = str(join_file(directory))
    else:
        os.environ["ATOLL_ADDRESS"], os.environ["ATOLL_INSECURE"] = f"127.0.0.1:{port}", "1"


def _socket_copy() -> Callable[[], float]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    authority = CertificateAuthority.make()
    client, host = (Identity(authority.certificate_for(role, role)) for role in (Role.CLIENT, Role.HOST))
    served: list[ssl.SSLSocket] = []
    serving = threading.Thread(target=lambda: served.append(host.serving.wrap_socket(accepted, server_side=True)))
    serving.start()
    sender = client.dialing.wrap_socket(dialed, server_hostname=server_name(Role.HOST))
    serving.join()
    return socket_copy(sender, served[0])
