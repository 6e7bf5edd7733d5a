"""One computation on devices of several islands, and what it survives."""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

BACK_SECONDS = 60.0
LONG = 1_000_000  # collectives: minutes


# `test_islands_apart` has computations across islands of one host.
@pytest.fixture(scope="module", params=[pytest.param("2x1x2", marks=pytest.mark.thorough), "2x2x1"])
def python(request: pytest.FixtureRequest, start_python: StartPython) -> RemotePython:
    """A child with two islands of two devices, of one host and of two."""
    return start_python(request.param)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("dcn", "ici"))


def sharded(*axes: Any) -> NamedSharding:
    return NamedSharding(mesh(), P(*axes))


def eight() -> Any:
    return jax.device_put(np.arange(8, dtype=np.float32), sharded(("dcn", "ici")))


# ---- what the child does


def gradient() -> list[float]:
    def loss(weights: Any, inputs: Any) -> Any:
        return jnp.sum((inputs @ weights) ** 2)

    weights = jax.device_put(np.ones((4, 4), np.float32), sharded(None, "ici"))
    inputs = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), sharded("dcn", None))
    return [float(each) for each in np.asarray(jax.jit(jax.grad(loss))(weights, inputs))[:, 0]]


def mesh_of_all() -> list[Any]:
    """Compute on a mesh that JAX makes of all devices, whose names and types of axes are as on one island."""
    found = jax.make_mesh((2, 2), ("dcn", "ici"), (jax.sharding.AxisType.Auto,) * 2)
    assert found == mesh()
    assert jax.make_mesh(axis_names=("x",), devices=jax.devices()[:2], **_shape(2)).size == 2
    explicit = jax.make_mesh((4,), ("x",), devices=jax.devices()[::-1])
    assert list(explicit.devices) == jax.devices()[::-1]
    assert explicit.axis_types == jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]).axis_types
    with pytest.raises(ValueError, match="Number of devices 4 must be"):
        jax.make_mesh((5,), ("x",))
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(found, P(("dcn", "ici"))))
    return [float(jnp.sum(x)), [device.slice_index for device in found.devices[:, 0]]]


def _shape(*sizes: int) -> dict[str, Any]:
    """Return the argument of `jax.make_mesh` for the sizes of the axes, whose name depends on the version of JAX."""
    return {next(iter(inspect.signature(jax.make_mesh).parameters)): sizes}


def manual_collectives() -> list[float]:
    def swap(shard: Any) -> Any:
        other = jax.lax.ppermute(shard, "dcn", [(0, 1), (1, 0)])
        return jax.lax.all_gather(other, "ici", tiled=True) + jax.lax.psum(jnp.sum(shard), ("dcn", "ici"))

    function = jax.shard_map(swap, mesh=mesh(), in_specs=P(("dcn", "ici")), out_specs=P("dcn"), check_vma=False)
    return [float(each) for each in np.asarray(jax.jit(function)(eight()))]


def mapped() -> list[float]:
    added = jax.pmap(lambda x: x + jax.lax.psum(x, "i"), axis_name="i")(np.arange(4, dtype=np.float32))
    return [float(each) for each in np.asarray(added)]


def compiled_ahead() -> tuple[list[float], int]:
    compiled = jax.jit(lambda x: x - jnp.mean(x)).lower(eight()).compile()
    return [float(each) for each in np.asarray(compiled(eight()))], len(compiled.input_shardings[0])


def donated() -> list[float]:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = eight()
    kept = np.asarray(x).copy()
    for _ in range(30):  # more than a host has in flight
        x = step(x)
    return [float(each) for each in np.asarray(x) - kept]


def called_back() -> tuple[list[float], list[float]]:
    seen: list[float] = []
    shape = jax.ShapeDtypeStruct((8,), np.float32)

    def function(x: Any) -> Any:
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(x))
        return jax.pure_callback(lambda each: np.asarray(each) * 2, shape, x)

    found = [float(each) for each in np.asarray(jax.jit(function)(eight()))]
    jax.effects_barrier()
    return found, seen


def called_back_eagerly() -> list[float]:
    """Let JAX drop the executable before its run calls the function."""

    def function(x: Any) -> Any:
        return jax.pure_callback(lambda each: np.asarray(each) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    spec = P(("dcn", "ici"))
    return [float(each) for each in jax.shard_map(function, mesh=mesh(), in_specs=spec, out_specs=spec)(eight())]


def resharded() -> list[list[float]]:
    everywhere = jax.jit(lambda x: x * 1, out_shardings=sharded())(eight())
    moved = jax.device_put(eight(), sharded("ici"))
    return [[float(each) for each in np.asarray(x)] for x in (everywhere, moved)]


def mixed_with_islands() -> list[float]:
    """Pass results of computations on one device to one on all, and back, while they are computed."""
    doubled = jax.jit(lambda x: x * 2)(eight())
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200_000, lambda _, y: y * 1.0, x) + 1)
    parts = [slow(shard.data) for shard in doubled.addressable_shards]
    joined = jax.make_array_from_single_device_arrays((8,), sharded(("dcn", "ici")), parts)
    together = jax.jit(lambda x: x - 1, donate_argnums=0)(joined)
    halves = [jax.jit(lambda x: x / 2)(shard.data) for shard in together.addressable_shards]
    return [float(each) for half in halves for each in np.asarray(half)]


def in_a_loop() -> list[float]:
    function = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y + jnp.max(y) * 0 + 1, x))
    return [float(each) for each in np.asarray(function(eight()))]


def in_a_program() -> list[float]:
    """Trace a program whose nodes are on one island, on both, and on the other one. Call it twice."""
    import atoll

    everywhere = sharded(("dcn", "ici"))
    first, second = (NamedSharding(Mesh(row, ("x",)), P("x")) for row in mesh().devices)

    def on(sharding: NamedSharding, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return jax.jit(function, in_shardings=sharding, out_shardings=sharding)

    doubled, tripled = on(first, lambda x: x * 2), on(second, lambda x: x * 3)
    centered = on(everywhere, lambda x: x - jnp.mean(x))
    function = atoll.program(lambda x: tripled(centered(doubled(x))))
    found = function(function(jax.device_put(np.arange(8, dtype=np.float32), first)))
    return [float(each) for each in np.asarray(found)]


def on_some_devices() -> float:
    pair = Mesh(np.array([jax.devices()[0], jax.devices()[3]]), ("x",))
    return float(jax.jit(jnp.sum)(jax.device_put(np.arange(4.0), NamedSharding(pair, P("x")))))


def on_a_hybrid_mesh(islands: int, devices: int) -> list[float]:
    """Train on a mesh of `mesh_utils.create_hybrid_device_mesh`, whose rows are the islands."""
    found = mesh_utils.create_hybrid_device_mesh((1, devices), (islands, 1))
    assert [[device.slice_index for device in row] for row in found] == [[row] * devices for row in range(islands)]
    return trained(found)


def trained(devices: np.ndarray) -> list[float]:
    """Return the losses and some weights: data-parallel over the rows of devices, sharded weights over the columns."""
    over = Mesh(devices, ("dcn", "ici"))
    inputs = jax.device_put(np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8), NamedSharding(over, P("dcn")))
    weights = jax.device_put(
        np.linspace(1, -1, 64, dtype=np.float32).reshape(8, 8), NamedSharding(over, P(None, "ici"))
    )

    @jax.jit
    def step(weights: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(inputs @ w) ** 2))(weights)
        return weights - 0.5 * gradient, loss

    losses = []
    for _ in range(3):
        weights, loss = step(weights)
        losses.append(float(loss))
    return [*losses, *np.asarray(weights)[0].tolist()]


NUMBERS = [float(each) for each in range(8)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (gradient, [1792.0, 2016.0, 2240.0, 2464.0]),
        (mesh_of_all, [28.0, [0, 1]]),
        (manual_collectives, [32.0, 33.0, 34.0, 35.0, 28.0, 29.0, 30.0, 31.0]),
        (mapped, [6.0, 7.0, 8.0, 9.0]),
        (compiled_ahead, ([each - 3.5 for each in NUMBERS], 1)),
        (donated, [30.0] * 8),
        (called_back, ([2 * each for each in NUMBERS], [28.0])),
        (called_back_eagerly, [2 * each for each in NUMBERS]),
        (resharded, [NUMBERS, NUMBERS]),
        (mixed_with_islands, NUMBERS),
        (in_a_loop, [each + 20 for each in NUMBERS]),
        (in_a_program, [36 * (each - 3.5) for each in NUMBERS]),
        (on_some_devices, 6.0),
    ],
)
def test_computations_run_on_the_devices_of_two_islands(python: RemotePython, function: Callable[[], Any], expected):
    found = python.call(function)
    if function is gradient:
        np.testing.assert_allclose(found, gradient_alone())
        return
    assert found == expected


def test_a_hybrid_mesh_has_the_devices_by_island_and_gives_the_values_of_stock(python: RemotePython) -> None:
    expected = trained(np.array(jax.devices()[:4]).reshape(2, 2))
    np.testing.assert_allclose(python.call(on_a_hybrid_mesh, 2, 2), expected, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(("islands", "devices"), [(2, 4), (4, 2)])
def test_a_hybrid_mesh_of_eight_devices(start_python: StartPython, islands: int, devices: int) -> None:
    expected = trained(np.array(jax.devices()).reshape(islands, devices))
    found = start_python(f"{islands}x1x{devices}").call(on_a_hybrid_mesh, islands, devices)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def gradient_alone() -> list[float]:
    inputs = np.arange(32, dtype=np.float32).reshape(8, 4)
    return [float(each) for each in (2 * inputs.T @ (inputs @ np.ones((4, 4), np.float32)))[:, 0]]


@pytest.mark.thorough
def test_tenants_compile_computations_over_islands_in_processes_of_their_own(start_cluster, start_python):
    """A compiler process has as many devices as an island."""
    tenants = (TenantSettings("ana", token_hash("ana's token")), TenantSettings("ben", token_hash("ben's token")))
    cluster = start_cluster(islands="2x1x2", token="the token of the cluster", tenants=tenants)
    for name in ("ana", "ben"):
        user = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=f"{name}'s token")
        assert user.call(manual_collectives) == [32.0, 33.0, 34.0, 35.0, 28.0, 29.0, 30.0, 31.0]
        assert user.call(called_back) == ([2 * each for each in NUMBERS], [28.0])


# ---- islands that fail


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    return start_cluster(islands="3x1x1")


@pytest.fixture(scope="module")
def user(cluster: StandingCluster, start_python: StartPython) -> RemotePython:
    user = start_python(ATOLL_ADDRESS=cluster.address)
    user.call(prepare)
    return user


state: dict[str, Any] = {}


def prepare() -> list[float]:
    devices = jax.devices()
    all_three, last_two = (NamedSharding(Mesh(np.array(each), ("x",)), P("x")) for each in (devices, devices[1:]))
    state.update(
        all=all_three,
        two=last_two,
        kept=[jax.device_put(np.arange(4.0), device) for device in devices],
        add=jax.jit(lambda x: x + jnp.sum(x) * 0 + 1),
        one=jax.jit(lambda x: x * 3),
        long=jax.jit(lambda x: jax.lax.fori_loop(0, LONG, lambda _, y: y + jnp.max(y) * 0 + 1, x)),
    )
    for each in state["kept"]:
        state["one"](each).block_until_ready()
    together(2)
    return together(3)


def together(islands: int) -> list[float]:
    x = jax.device_put(np.arange(6.0), state["all" if islands == 3 else "two"])
    return [float(each) for each in np.asarray(state["add"](state["add"](x)))]


def prepare_to_compute_for_long() -> None:
    """Put the input and compile the function, so that nothing but the computation is in flight later."""
    state["input"] = jax.device_put(np.arange(6.0), state["all"]).block_until_ready()
    state["compiled"] = state["long"].lower(state["input"]).compile()


def compute_for_long() -> tuple[float, str]:
    """Compute until an error, and return when it came, and its text."""
    try:
        state["compiled"](state["input"]).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return time.time(), str(error)
    return time.time(), ""


def alone(islands: tuple[int, ...]) -> list[float]:
    return [float(np.asarray(state["one"](state["kept"][each]))[1]) for each in islands]


def put_again(island: int) -> None:
    state["kept"][island] = jax.device_put(np.arange(4.0), jax.devices()[island])


@pytest.mark.parametrize("lost", [2, 0])
def test_a_lost_island_fails_a_collective_in_flight_and_costs_the_other_islands_nothing(cluster, user, lost):
    """Also the loss of island 0, whose host runs the coordination service."""
    others = tuple(each for each in range(3) if each != lost)
    user.call(prepare_to_compute_for_long)
    user.begin(compute_for_long)
    cluster.until(lambda report: all(each["in_flight"] for each in report["islands"]), BACK_SECONDS)
    time.sleep(0.1)  # the computation takes minutes
    workers = [cluster.worker(host).pid for host in others]
    compilations = cluster.report()["functions"]
    cluster.worker(lost).send_signal(signal.SIGKILL)
    ended = time.time()
    failed, error = user.finish()
    assert failed - ended < 10.0
    assert "DATA_LOSS" in error
    assert f"host {lost} of island {lost} is gone" in error
    # The other islands keep their arrays and compiled functions while the lost island restarts.
    assert user.call(alone, others) == [3.0, 3.0]
    if lost == 0:
        assert user.call(together, 2) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    cluster.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), BACK_SECONDS)
    assert user.call(together, 3) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert user.call(together, 2) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert user.call(alone, others) == [3.0, 3.0]
    # All hosts of these functions, also the restarted one, have found them in their caches.
    functions = cluster.report()["functions"]
    assert functions["compiled"] == compilations["compiled"]
    assert functions["cached"] > compilations["cached"]
    assert [cluster.worker(host).pid for host in others] == workers
    user.call(put_again, lost)
