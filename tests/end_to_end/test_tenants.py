"""Tenants on a real cluster: who gets in, what each gets of the devices, and that one's excess is nobody else's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from atoll.cluster.tenants import TenantRole, TenantSettings, token_hash
from atoll.operate.requests import request_operation, request_trace
from atoll.protocol import messages as m
from atoll.protocol.spans import Span
from atoll.wire.address import parse_address
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

SECONDS = 1.5
SHARED_SECONDS = 3.0  # in which two clients share the devices
SLICE, SLICES = 200_000_000, 10  # ns: the two seconds of these that are looked at
MB = 1 << 20


def token_of(name: str) -> str:
    return f"the token of {name}"


def tenant(name: str, **settings: Any) -> TenantSettings:
    return TenantSettings(name, token_hash(token_of(name)), **settings)


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    return start_cluster(
        islands="1x1x2",
        device_memory=256 * MB,
        token="the token of the cluster",
        tenants=(
            tenant("small", share=1.0, memory=8 * MB),
            tenant("large", share=3.0),
            tenant("service", priority=1, role=TenantRole.OPERATOR),
        ),
    )


def busy(spans: Iterable[Span], begin: float, end: float) -> float:
    """Nanoseconds from `begin` to `end` in which these had the devices."""
    return sum(max(0.0, min(span.ended, end) - max(span.started, begin)) for span in spans)


def user(start_python: StartPython, cluster: StandingCluster, name: str) -> RemotePython:
    return start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=token_of(name))


# ---- what runs in clients


def compute(loops: int, seconds: float) -> tuple[int, int]:
    """Steps of so many loops each, with others in line behind the one that runs. (its process, how many)"""
    import os

    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda x: jax.lax.fori_loop(0, loops, lambda _, v: jnp.sin(v) + 1.0, x))
    x, count, end = jnp.zeros(4096, jnp.float32), 0, time.monotonic() + seconds
    step(x).block_until_ready()
    waiting: list[Any] = []
    while time.monotonic() < end:
        x = step(x)
        waiting.append(x)
        if len(waiting) > 128:
            waiting.pop(0).block_until_ready()
        count += 1
    x.block_until_ready()
    return os.getpid(), count


def calls_now_and_then(loops: int, count: int) -> list[float]:
    """Seconds that each of so many short calls took, one now and then."""
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda x: jax.lax.fori_loop(0, loops, lambda _, v: jnp.sin(v) + 1.0, x))
    x, took = jnp.zeros(16, jnp.float32), []
    step(x).block_until_ready()
    for _ in range(count):
        time.sleep(0.11)
        started = time.perf_counter()
        step(x).block_until_ready()
        took.append(time.perf_counter() - started)
    return took


def allocate_without_end(seconds: float) -> int:
    """How many times that ended for want of memory, with an error that says so: at least once, and for so long."""
    import jax.numpy as jnp

    errors, end, kept = 0, time.monotonic() + seconds, []
    while time.monotonic() < end or (not errors and time.monotonic() < end + 30):
        try:
            kept.append(jnp.ones((1 << 18,), jnp.float32) + len(kept))
            kept[-1].block_until_ready()
        except Exception as error:
            # With the line of the user's code that made the arrays.
            errors += "quota `memory`" in str(error) and "test_tenants.py" in str(error)
            kept = kept[-4:]
    return errors


def double() -> float:
    import jax.numpy as jnp

    return float(jnp.float32(21) * 2)


# ---- tests


def test_nobody_computes_without_a_token(start_python: StartPython, cluster: StandingCluster) -> None:
    stranger = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="not one of theirs")
    with pytest.raises(RemoteError, match="set ATOLL_TOKEN to your tenant's"):
        stranger.call(double)
    assert user(start_python, cluster, "small").call(double) == 42.0


def test_device_time_goes_by_shares(start_python: StartPython, cluster: StandingCluster) -> None:
    clients = [user(start_python, cluster, name) for name in ("small", "large")]
    for client in clients:
        client.call(compute, 400, 0.1)
    for client in clients:
        client.begin(compute, 400, SHARED_SECONDS)
    pids = [client.finish()[0] for client in clients]
    number = {each["pid"]: each["id"] for each in cluster.report()["sessions"]}
    spans = request_trace(parse_address(cluster.address), cluster.token).spans
    by_session = [[span for span in spans if span.session == number[pid]] for pid in pids]
    # Before and after this each has the devices for itself for a while: they compile, and drain.
    end = min(each[-1].ended for each in by_session) - 300_000_000
    small, large = (
        np.array([busy(each, end - (i + 1) * SLICE, end - i * SLICE) for i in range(SLICES)]) for each in by_session
    )
    # The shares hold while both have work in line: the median of slices leaves out when a busy machine kept one of
    # the two clients from launching.
    ratios = large / small
    assert 2.4 < np.median(ratios) < 3.6, ratios


def test_what_is_of_a_higher_priority_waits_for_no_line(start_python: StartPython, cluster: StandingCluster) -> None:
    crowd = user(start_python, cluster, "large")
    service = user(start_python, cluster, "service")
    crowd.begin(compute, 2000, SECONDS + 1.0)
    time.sleep(0.5)
    took = sorted(service.call(calls_now_and_then, 1, 15))
    count = crowd.finish()[1]
    each = (SECONDS + 1.0) / count
    # The rest of one and one more, of a hundred that are in line: far less than all of these, on a busy machine, too.
    assert took[len(took) // 2] < 30 * each


def test_a_tenant_at_its_quota_disturbs_nobody(start_python: StartPython, cluster: StandingCluster) -> None:
    greedy, other = user(start_python, cluster, "small"), user(start_python, cluster, "large")
    other.call(compute, 40, 0.5)
    greedy.begin(allocate_without_end, SECONDS)
    assert other.call(compute, 40, SECONDS)[1] > 50
    assert greedy.finish() > 0


def test_an_operator_ends_a_session_and_its_client_reads_why(
    start_python: StartPython, cluster: StandingCluster
) -> None:
    client = user(start_python, cluster, "small")
    client.call(double)
    pid = client.process.pid
    number = next(each["id"] for each in cluster.report()["sessions"] if each["pid"] == pid)
    address = parse_address(cluster.address)
    assert "has ended" in request_operation(address, token_of("service"), m.EndSessionRequest(number))
    with pytest.raises(RemoteError, match="it was ended by the tenant service"):
        client.call(double)


def slice_of_my_own() -> tuple[list[int], float]:
    import jax
    import jax.numpy as jnp

    import atoll

    mine = atoll.make_virtual_device_set().add_slice(devices=1, exclusive=True)
    x = jax.device_put(jnp.arange(4.0), mine.devices[0])
    return [device.id for device in jax.devices()], float((x * 2).sum())


def devices_and_sum() -> tuple[int, float]:
    import jax
    import jax.numpy as jnp

    return len(jax.devices()), float(jnp.arange(5.0).sum())


def test_others_do_not_get_the_devices_of_an_exclusive_slice(
    start_python: StartPython, start_cluster: StartCluster
) -> None:
    cluster = start_cluster(islands="1x1x4")
    owner, other = (start_python(ATOLL_ADDRESS=cluster.address) for _ in range(2))
    assert owner.call(slice_of_my_own)[1] == 12.0
    assert other.call(devices_and_sum) == (3, 10.0)
