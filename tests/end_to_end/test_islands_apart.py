"""Computations on islands that communicate only inside each island: they start no world, and equal stock JAX."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.same import assert_same
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

BACK_SECONDS = 60.0
TENANTS = (TenantSettings("ana", token_hash("ana's token")), TenantSettings("ben", token_hash("ben's token")))
ROWS = P(("dcn", "ici"))


class Users:
    """A cluster of two islands with two devices each, and its clients."""

    def __init__(self, cluster: StandingCluster, user: RemotePython) -> None:
        self.cluster = cluster
        self.user = user

    @property
    def listening(self) -> int:
        """The number of TCP sockets at which its workers wait for others. Collectives over islands need some."""
        hosts = (each for island in self.cluster.report()["islands"] for each in island["hosts"])
        sockets = (each for host in hosts for each in psutil.Process(host["pid"]).net_connections("tcp"))
        return sum(each.status == psutil.CONN_LISTEN for each in sockets)


@pytest.fixture(scope="module")
def users(start_cluster: StartCluster, start_python: StartPython) -> Users:
    """Islands of one host, whose programs compiler processes compile."""
    cluster = start_cluster(islands="2x1x2", token="the token of the cluster", tenants=TENANTS)
    return Users(cluster, start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN="ana's token"))


@pytest.fixture(scope="module")
def users_of_two_hosts(start_cluster: StartCluster, start_python: StartPython) -> Users:
    """Islands of two hosts, which compile programs themselves."""
    cluster = start_cluster(islands="2x2x1")
    return Users(cluster, start_python(ATOLL_ADDRESS=cluster.address))


# ---- called in the clients and on stock JAX


def mesh(order: tuple[int, ...] = (0, 1, 2, 3)) -> Mesh:
    return Mesh(np.array([jax.devices()[each] for each in order]).reshape(2, 2), ("dcn", "ici"))


def sharded(spec: P, order: tuple[int, ...] = (0, 1, 2, 3)) -> NamedSharding:
    return NamedSharding(mesh(order), spec)


_types: list[Any] = [np.float32]


def compute_with(dtype: str) -> None:
    """Use another type, so that all programs are new."""
    _types[:] = [np.dtype(dtype).type]


def matrix() -> Any:
    return np.random.default_rng(3).random((8, 8), np.float64).astype(_types[0])


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def mapped(body: Callable[..., Any], spec: P = ROWS, order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """Run a function on each shard of a matrix."""
    function = jax.shard_map(body, mesh=mesh(order), in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(function)(jax.device_put(matrix(), sharded(spec, order))))


def partitioned(function: Callable[..., Any], before: P, after: P, order: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """Run a function that XLA partitions."""
    run = jax.jit(function, out_shardings=sharded(after, order))
    return np.asarray(run(jax.device_put(matrix(), sharded(before, order))))


def elements() -> list[Any]:
    """Compute without any communication, and know the number of each device."""
    places = mapped(lambda x: x * 0 + 10 * jax.lax.axis_index("dcn") + jax.lax.axis_index("ici"))
    step = jax.jit(lambda x: jnp.tanh(x) * 1.5 + 0.1, donate_argnums=0)
    x = jax.device_put(matrix(), sharded(P("dcn", "ici")))
    for _ in range(30):  # more than a host has in flight
        x = step(x)
    everywhere = jax.jit(lambda x: x @ x)(jax.device_put(matrix(), sharded(P())))
    return [places, np.asarray(x), np.asarray(everywhere)]


def random_numbers() -> list[Any]:
    """Make random numbers, of which each device makes its own part."""
    keys = [jax.random.key(7), jax.random.key(7, impl="rbg")]
    made = [
        jax.jit(lambda key=key: jax.random.normal(key, (8, 8), np.float32), out_shardings=sharded(ROWS))()
        for key in keys
    ]

    def body(x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(1), jax.lax.axis_index("dcn") * 2 + jax.lax.axis_index("ici"))
        return x + jax.random.uniform(key, x.shape)

    return [*host(made), mapped(body)]


def collectives_inside() -> list[Any]:
    return [
        mapped(lambda x: x + jax.lax.psum(x, "ici")),
        mapped(lambda x: x + jax.lax.all_gather(x, "ici", tiled=True).sum(0)),
        mapped(lambda x: x + jax.lax.psum_scatter(x, "ici", tiled=True).sum(0)),
        mapped(lambda x: jax.lax.all_to_all(x, "ici", 0, 0, tiled=True)),
        mapped(lambda x: jax.lax.pmax(x, "ici") - jax.lax.pmin(x, "ici")),
    ]


def sum_inside() -> Any:
    return mapped(lambda x: x + jax.lax.psum(x, "ici"))


def permutation_inside() -> Any:
    return mapped(lambda x: jax.lax.ppermute(x, "ici", [(0, 1), (1, 0)]))


def collectives_in_control_flow() -> list[Any]:
    def total(x: Any) -> Any:
        return jax.lax.psum(x, "ici") * 0.25

    def until_large(x: Any) -> Any:
        """Loop a different number of times on each island."""
        start = x + jax.lax.axis_index("dcn") * 4
        return jax.lax.while_loop(lambda y: jax.lax.psum(y.sum(), "ici") < 900, lambda y: y + total(y) * 0.1, start)

    def branch(x: Any) -> Any:
        """Communicate only on one of the islands."""
        return jax.lax.cond(jax.lax.axis_index("dcn") == 1, total, lambda y: y, x)

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda y, _: (jnp.sin(total(y)) + y, None), x, None, length=5)[0]

    def gradient(x: Any) -> Any:
        return jax.grad(lambda y: jnp.sum(jax.checkpoint(lambda z: jnp.cos(total(jnp.sin(z))))(y)))(x)

    return [mapped(each) for each in (until_large, branch, scanned, gradient)]


def partitioned_inside() -> list[Any]:
    both = P("dcn", "ici")
    return [
        partitioned(lambda x: x + x.sum(1, keepdims=True), both, both),
        partitioned(lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True), both, both),
        partitioned(lambda x: x @ np.ones((8, 8), np.float32), both, both),
        partitioned(lambda x: jnp.sort(x, 1), both, both),
        partitioned(lambda x: x.argmax(1), both, P("dcn")),
        partitioned(lambda x: x * 2, both, P("dcn", None)),
    ]


def permutations_inside() -> list[Any]:
    both = P("dcn", "ici")
    return [
        mapped(lambda x: jax.lax.ppermute(x, "ici", [(0, 1), (1, 0)])),
        mapped(lambda x: jax.lax.ppermute(x, "ici", [(0, 1)])),
        partitioned(lambda x: jnp.roll(x, 1, 1), both, both),
        partitioned(lambda x: x[:, ::-1], both, both),
    ]


def across_islands() -> list[Any]:
    """Compute with collectives across islands that only the compiled program shows, or that are inside of loops."""
    interleaved = (0, 2, 1, 3)

    def loop(x: Any) -> Any:
        deep = lambda y: jax.lax.cond(y[0, 0] > -1, lambda z: z + jax.lax.pmax(z, "dcn"), lambda z: z, y)  # noqa: E731
        return jax.lax.fori_loop(0, 4, lambda _, y: deep(y) * 0.5, x)

    return [
        mapped(loop),
        mapped(lambda x: x + jax.lax.pmax(x, "ici"), order=interleaved),
        mapped(lambda x: jax.lax.ppermute(x, "ici", [(0, 1), (1, 0)]), order=interleaved),
        mapped(lambda x: jax.lax.all_to_all(x, ("dcn", "ici"), 1, 0, tiled=True), P(("dcn", "ici"), None)),
        partitioned(lambda x: jnp.roll(x, 1, 0), ROWS, ROWS),
        partitioned(lambda x: jnp.sort(x, 0), ROWS, ROWS),
        partitioned(lambda x: jnp.flip(x, 0), ROWS, ROWS),
        partitioned(lambda x: x * 2, ROWS, P()),
        partitioned(lambda x: x.at[:4].add(x[4:]), ROWS, ROWS),
        partitioned(lambda x: x.T, P("dcn", "ici"), P("dcn", "ici")),
    ]


def on_several_meshes() -> list[Any]:
    """Run one function on meshes on which it needs a world, and on others."""
    step = jax.jit(
        lambda x: (
            x + jax.lax.with_sharding_constraint(x.max(1, keepdims=True), NamedSharding(x.sharding.mesh, P("dcn")))
            if hasattr(x, "sharding") and isinstance(x.sharding, NamedSharding)
            else x + x.max(1, keepdims=True)
        )
    )
    found = []
    for _ in range(2):
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
            found.append(np.asarray(step(jax.device_put(matrix(), sharded(P("dcn", "ici"), order)))))
    for some in ((0, 2), (1, 2, 3), (0, 1, 3)):
        row = NamedSharding(Mesh(np.array([jax.devices()[each] for each in some]), ("x",)), P("x"))
        found.append(np.asarray(jax.jit(lambda x: x * 3)(jax.device_put(np.arange(12.0), row))))
        found.append(np.asarray(jax.jit(lambda x: x - x.max())(jax.device_put(np.arange(12.0), row))))
    return found


def back_and_forth() -> list[Any]:
    """Pass arrays between computations in a world, on islands apart, and on single devices, and donate them."""
    apart = jax.jit(lambda x: x + 1, donate_argnums=0)
    together = jax.jit(lambda x: x + x.max() * 0, donate_argnums=0)
    x = jax.device_put(matrix(), sharded(ROWS))
    for _ in range(5):
        x = apart(together(x))
        parts = [jax.jit(lambda y: y * 2)(shard.data) for shard in x.addressable_shards]
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    kept = jnp.copy(x)
    return host([kept, apart(x), kept[:4], jax.device_put(kept, sharded(P("ici")))])


def groups_of_pmap() -> list[Any]:
    devices = jax.devices()[:4]
    found = []
    for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]):
        add = jax.pmap(
            lambda x, groups=groups: x + jax.lax.psum(x, "i", axis_index_groups=groups), axis_name="i", devices=devices
        )
        found.append(np.asarray(add(np.arange(4.0))))
    return found


def programs_with_replicas() -> list[Any]:
    """Run programs of two replicas with two partitions each, as no function of JAX makes them any more."""
    channel = ", channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>"
    return [
        replicated(order, operation)
        for order in ((0, 1, 2, 3), (0, 2, 1, 3))
        for operation in (
            all_reduce("[[0, 1]]"),
            all_reduce("[[0], [1]]"),
            all_reduce("[[0], [1]]", channel),
            all_reduce("[[0, 1], [2, 3]]", f"{channel}, use_global_device_ids"),
            permutation("[[0, 1], [1, 0]]", channel),
            permutation("[[0, 1], [1, 0]]"),
        )
    ]


def all_reduce(groups: str, more: str = "") -> str:
    rows = groups.count("[") - 1
    size = len(groups.split("]")[0].split(","))
    return f"""%y = "stablehlo.all_reduce"(%x) ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %c = stablehlo.add %a, %b : tensor<f32>
          "stablehlo.return"(%c) : (tensor<f32>) -> ()
      }}) {{replica_groups = dense<{groups}> : tensor<{rows}x{size}xi64>{more}}} : (tensor<4xf32>) -> tensor<4xf32>"""


def permutation(pairs: str, more: str = "") -> str:
    return f"""%y = "stablehlo.collective_permute"(%x)
      {{source_target_pairs = dense<{pairs}> : tensor<2x2xi64>{more}}} : (tensor<4xf32>) -> tensor<4xf32>"""


def replicated(order: tuple[int, ...], operation: str) -> Any:
    """Run an operation on a shard of four numbers on each device."""
    devices = [jax.devices()[each] for each in order]
    options = xc.CompileOptions()
    options.device_assignment = xc.DeviceAssignment.create(np.array([[d.id for d in devices]], np.int32).reshape(2, 2))
    build = options.executable_build_options
    options.num_replicas = options.num_partitions = build.num_replicas = build.num_partitions = 2
    build.use_spmd_partitioning = True
    row = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    with mlir.make_ir_context():
        module = ir.Module.parse(
            f"""module @replicated attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 2 : i32}} {{
              func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
                {operation}
                return %y : tensor<4xf32>
              }}
            }}"""
        )
        loaded = compiler.backend_compile_and_load(
            devices[0].client, module, xc.DeviceList(tuple(devices)), options, []
        )
    results = loaded.execute_sharded([jax.device_put(np.arange(16, dtype=np.float32), row)])
    return host(results.disassemble_into_single_device_arrays()[0])


APART = (elements, random_numbers, collectives_inside, collectives_in_control_flow, partitioned_inside)
TOGETHER = (permutations_inside, across_islands, back_and_forth, programs_with_replicas)


# ---- tests


def check_connections(users: Users, functions: tuple[Callable[[], Any], ...], last: Callable[[], Any]) -> None:
    """Check that only the last function needs connections between islands, and that all results are those of stock."""
    before = users.listening
    for function in functions:
        assert_same(users.user.call(function), function())
        assert users.listening == before, function.__name__
    assert_same(users.user.call(last), last())
    assert users.listening > before


def test_islands_that_do_not_communicate_get_the_results_of_stock_jax_and_no_connections(users: Users) -> None:
    """The first test: later ones start worlds."""
    check_connections(users, APART, groups_of_pmap)


def test_hosts_communicate_within_islands_without_connections_to_others(users_of_two_hosts: Users) -> None:
    check_connections(users_of_two_hosts, (sum_inside,), permutation_inside)


@pytest.mark.parametrize("function", TOGETHER)
def test_islands_that_communicate_get_the_results_of_stock_jax(users: Users, function: Callable[[], Any]) -> None:
    assert_same(users.user.call(function), function())


def test_one_function_needs_a_world_on_some_meshes(users: Users) -> None:
    assert_same(users.user.call(on_several_meshes), on_several_meshes())


@pytest.mark.thorough
def test_functions_apart_that_are_compiled_beside_a_world_get_the_results_of_stock_jax(users: Users) -> None:
    """They are loaded in the world, because their arguments are probably there."""
    users.user.call(compute_with, "float64")
    compute_with("float64")
    try:
        for function in (elements, back_and_forth):
            assert_same(users.user.call(function), function())
    finally:
        users.user.call(compute_with, "float32")
        compute_with("float32")


def same_program(rounds: int, crosses: bool) -> list[float]:
    """Compile programs that another client compiles at the same time."""
    found = []
    for number in range(rounds):
        x = jax.device_put(np.arange(8.0), sharded(ROWS))
        found.append(float(jax.jit(lambda x, number=number: x * number + 1)(x)[3]))
        if crosses and number == rounds // 2:
            found.append(float(jax.jit(lambda x: x.max())(x)))
    return found


@pytest.mark.thorough
def test_clients_compile_the_same_programs_while_one_of_them_needs_a_world(
    users: Users, start_python: StartPython
) -> None:
    ben = {"ATOLL_ADDRESS": users.cluster.address, "ATOLL_TOKEN": "ben's token"}
    clients = [start_python(**ben) for _ in range(2)]
    for number, client in enumerate(clients):
        client.begin(same_program, 6, number == 0)
    expected = [3.0 * each + 1 for each in range(6)]
    first, second = (client.finish() for client in clients)
    assert second == expected
    assert first == [*expected[:4], 7.0, *expected[4:]]


# ---- sockets


def over_islands(islands: int, crosses: bool) -> list[float]:
    """Compute on all devices of so many islands, with collectives inside of them or across."""
    found = Mesh(np.array(jax.devices()).reshape(islands, -1), ("dcn", "ici"))
    x = jax.device_put(np.arange(8.0), NamedSharding(found, ROWS))

    def body(shard: Any) -> Any:
        number = jax.lax.axis_index("dcn") * found.shape["ici"] + jax.lax.axis_index("ici")
        return shard + 10 * number + jax.lax.psum(shard, "dcn" if crosses else "ici")

    mapped = jax.jit(jax.shard_map(body, mesh=found, in_specs=ROWS, out_specs=ROWS))
    return [float(each) for each in np.asarray(mapped(jax.jit(lambda x: x + 1)(x)))]


def tcp_sockets(cluster: StandingCluster) -> int:
    hosts = [host for island in cluster.report()["islands"] for host in island["hosts"]]
    return sum(len(psutil.Process(host["pid"]).net_connections("tcp")) for host in hosts)


@pytest.mark.thorough  # `check_connections` has the same with islands of two devices
@pytest.mark.parametrize("islands", [2, 4])
def test_workers_have_sockets_only_after_collectives_across_islands(
    start_cluster: StartCluster, start_python: StartPython, islands: int
) -> None:
    cluster = start_cluster(islands=f"{islands}x1x{8 // islands}")
    user = start_python(ATOLL_ADDRESS=cluster.address)
    inside = [sum(row) for row in np.arange(1.0, 9.0).reshape(islands, -1)]
    across = np.arange(1.0, 9.0).reshape(islands, -1).sum(0)
    expected = [11.0 * each + 1 for each in range(8)]
    found = user.call(over_islands, islands, False)
    assert found == [each + inside[i * islands // 8] for i, each in enumerate(expected)]
    assert tcp_sockets(cluster) == 0
    found = user.call(over_islands, islands, True)
    assert found == [each + across[i % (8 // islands)] for i, each in enumerate(expected)]
    assert tcp_sockets(cluster) > 0


# ---- islands that fail


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    return start_cluster(islands="3x1x1")


state: dict[str, Any] = {}


def prepare() -> float:
    devices = jax.devices()
    spread = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    state.update(
        spread=spread,
        kept=[jax.device_put(np.arange(4.0), device) for device in devices],
        add=jax.jit(lambda x: x + 1),
        long=jax.jit(
            jax.shard_map(
                lambda x: jax.lax.fori_loop(0, 30_000_000, lambda _, y: jnp.sin(y) + 1, x),
                mesh=spread.mesh,
                in_specs=P("x"),
                out_specs=P("x"),
            )
        ),
    )
    return add_everywhere()


def add_everywhere() -> float:
    x = jax.device_put(np.arange(6.0), state["spread"])
    return float(np.asarray(state["add"](state["add"](x))).sum())


def add_alone(islands: tuple[int, ...]) -> list[float]:
    return [float(np.asarray(state["add"](state["kept"][each])).sum()) for each in islands]


def compute_for_long() -> str:
    try:
        state["long"](jax.device_put(np.arange(6.0), state["spread"])).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("losses", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_lost_island_fails_a_function_apart_and_comes_back_without_a_world(
    cluster: StandingCluster, start_python: StartPython, losses: int
) -> None:
    user = start_python(ATOLL_ADDRESS=cluster.address)
    assert user.call(prepare) == 27.0
    before = Users(cluster, user).listening
    workers = [cluster.worker(host).pid for host in (0, 1)]
    for _ in range(losses):
        user.begin(compute_for_long)
        time.sleep(0.5)
        cluster.worker(2).send_signal(signal.SIGKILL)
        error = user.finish(BACK_SECONDS)
        assert "DATA_LOSS" in error
        assert "host 2 of island 2 is gone" in error
        assert user.call(add_alone, (0, 1)) == [10.0, 10.0]
        cluster.until(lambda report: all(each["state"] == "ready" for each in report["islands"]), BACK_SECONDS)
        assert user.call(add_everywhere) == 27.0
    assert [cluster.worker(host).pid for host in (0, 1)] == workers
    assert Users(cluster, user).listening == before
