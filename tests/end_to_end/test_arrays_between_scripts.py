"""Tests of named arrays between scripts: tenants, shardings, donations, killed publishers, lost islands, and a lost
controller.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import atoll
from atoll import pins
from atoll.client import array_packing
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.errors import Details, Kind, StatusError, details_of
from atoll.operate.operator_requests import request_check
from atoll.wire.address import parse_address
from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster
from tests.thoroughness import TIMES

TOKENS = {name: f"the token of {name}" for name in ("trainer", "rollouts", "eve", "cluster")}
SECONDS = 300.0


@pytest.fixture(scope="module")
def shared(start_cluster: StartCluster) -> StandingCluster:
    tenants = (
        TenantSettings("trainer", token_hash(TOKENS["trainer"]), publish=("policy*",)),
        TenantSettings("rollouts", token_hash(TOKENS["rollouts"]), subscribe=("trainer/policy*",)),
        TenantSettings("eve", token_hash(TOKENS["eve"])),
    )
    return start_cluster(islands="2x1x2", token=TOKENS["cluster"], tenants=tenants)


# ---- functions that scripts run


def publish(step: int, name: str = "policy", keep: int = 2) -> int:
    """Publish arrays whose elements are the number of the step, and donate them to the next step."""
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    place = NamedSharding(mesh, PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.full((64, 8), step, jnp.float32), place), "b": [jnp.full(3, step)]}
    version = atoll.publish(name, params, keep=keep)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    assert float(update(params)["w"].sum()) == (step + 1) * 64 * 8
    return version


def publish_for_ever(first: int) -> None:
    step = first
    while True:
        publish(step)
        step += 1


def read(
    name: str = "trainer/policy", newer_than: int | None = None, version: int | None = None, wait: float = 60.0
) -> tuple[int, list[float], list[int]]:
    """Read a version. Return its number, the distinct values in it, and its devices."""
    mesh = Mesh(np.array(jax.devices()[2:4]), "y")
    place = {"w": NamedSharding(mesh, PartitionSpec(None, "y")), "b": NamedSharding(mesh, PartitionSpec())}
    found = atoll.subscribe(name, place, newer_than=newer_than, version=version, wait=wait)
    leaves = jax.tree.leaves(found.tree)
    values = sorted({float(value) for leaf in leaves for value in np.asarray(leaf, np.float32).ravel()})
    return found.number, values, sorted({device.id for leaf in leaves for device in leaf.sharding.device_set})


def read_many(count: int, newer_than: int) -> list[tuple[int, list[float]]]:
    found = []
    for _ in range(count):
        newer_than, values, _ = read("trainer/policy", newer_than)
        found.append((newer_than, values))
    return found


def convert() -> tuple[str, str]:
    tree = atoll.subscribe("trainer/policy", dtype=jnp.bfloat16).tree
    return str(tree["w"].dtype), str(tree["b"][0].dtype)


def publish_half() -> int:
    """Publish arrays in another dtype, one of which the script donates."""
    params = {"w": jax.device_put(jnp.arange(8.0), jax.devices()[0]), "n": jnp.arange(3)}
    for _ in range(2):
        version = atoll.publish("policy-half", params, dtype=jnp.bfloat16)
        params["w"] = jax.jit(lambda w: w + 1, donate_argnums=0)(params["w"])
    return version


def read_half() -> tuple[str, list[float], list[int]]:
    tree = atoll.subscribe("trainer/policy-half", version=2).tree
    return str(tree["w"].dtype), [float(each) for each in tree["w"]], [int(each) for each in tree["n"]]


def publish_small(step: int) -> int:
    """Publish many small arrays of two shapes, and a large one."""
    place = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec(None, "x"))
    cut = [jax.device_put(np.arange(8, dtype=np.int32).reshape(2, 4) + step + i, place) for i in range(35)]
    whole = [jnp.full((), step + i, jnp.float32) for i in range(33)]
    large = jax.device_put(jnp.full((64, 128), step, jnp.float32), place)
    with jax.set_mesh(Mesh(np.array(jax.devices()[2:4]), "z")):  # the mesh of the script's own computations
        return atoll.publish("policy-small", {"cut": cut, "whole": tuple(whole), "large": large}, checksums=True)


def read_small(step: int, first: int, cut: tuple[str | None, ...]) -> tuple[int, bool, list[str]]:
    """Read these arrays, sharded by `cut`. Return the version, whether the values are right, and the shardings."""
    mesh = Mesh(np.array(jax.devices()[first : first + 2]), "y")
    place = NamedSharding(mesh, PartitionSpec(*cut))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[first])
    shardings = {"cut": [place] * 34 + [one], "whole": one, "large": place}
    with jax.set_mesh(Mesh(np.array(jax.devices()[:2]), "z")):
        found = atoll.subscribe("trainer/policy-small", shardings)
    like = {"cut": [0] * 35, "whole": (0,) * 33, "large": 0}
    again = atoll.subscribe("trainer/policy-small", shardings, like=like, verify=True)
    assert jax.tree.structure(again.tree) == jax.tree.structure(found.tree)
    is_right = True
    for tree in (found.tree, again.tree):
        for i, each in enumerate(tree["cut"]):
            is_right &= np.array_equal(each, np.arange(8).reshape(2, 4) + step + i)
        is_right &= [float(each) for each in tree["whole"]] == [step + i for i in range(33)]
        is_right &= bool((np.asarray(tree["large"]) == step).all())
    leaves = jax.tree.leaves(found.tree)
    return found.number, is_right, sorted({str(each.sharding.spec) for each in leaves if len(each.devices()) > 1})


def small_while_an_island_fails(name: str) -> list[Any]:
    """Publish and read small arrays. The function of `array_packing` with this name cannot be compiled.

    Return the error, and what a program can react to.
    """

    def fail(*arguments: Any) -> Any:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: island 1 failed, and restarts [atoll: island 1, retriable]")

    cached = getattr(array_packing, name)
    setattr(array_packing, name, fail)
    try:
        publish_small(100)
        atoll.subscribe("policy-small")
    except StatusError as error:
        return [str(error), details_of(error)]
    finally:
        setattr(array_packing, name, cached)
    return []


_kept: list[Any] = []


def keep_small() -> None:
    """Read the arrays of `publish_small`, and do not use them."""
    _kept.append(atoll.subscribe("trainer/policy-small", jax.sharding.SingleDeviceSharding(jax.devices()[2])).tree)


def use_one() -> list[int]:
    """Use one of the arrays that were kept."""
    found: list[int] = (_kept[-1]["cut"][3] + 1).ravel().tolist()
    return found


def donate_one() -> tuple[float, list[bool]]:
    """Donate one of the arrays that were kept. Return the result, and whether it and the next one are deleted."""
    whole = _kept[-1]["whole"]
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(whole[5])
    return float(result), [each.is_deleted() for each in whole[5:7]]


def drop_all() -> None:
    """Drop the arrays that were kept. Connect to the cluster if this is the first call."""
    _kept.clear()
    gc.collect()
    jax.devices()


def pin_first() -> list[str]:
    """Pin a version, replace it, and read it before and after it is released."""
    found = []
    first = publish(1, "policy-pinned", keep=1)
    pinned = atoll.pin("policy-pinned")
    newest = publish(2, "policy-pinned", keep=1)
    assert pinned.number == first < newest == atoll.subscribe("policy-pinned", newer_than=first).number
    for _ in range(2):
        try:
            tree = pinned.read().tree
            found.append(f"values {sorted({float(each) for leaf in jax.tree.leaves(tree) for each in leaf.ravel()})}")
        except StatusError as error:
            found.append(error.status.message)
        pinned.release()
    return found


def count_arrays() -> list[tuple[str, int]]:
    """Publish arrays and donate them in each step.

    Return the numbers of arrays that the devices have copied at the same time.
    """
    copies: list[tuple[str, int]] = []
    params = [jnp.full((64, 128), 7.0)]
    update = jax.jit(lambda tree: [x + 1 for x in tree], donate_argnums=0)
    before = array_packing.copied
    array_packing.copied = lambda arrays: copies.append(("copied", len(arrays))) or before(arrays)
    for _ in range(4):
        atoll.publish("policy-donated", params)
        params = update(params)
        copies.append(("step", int(params[0][0, 0])))
    newest = atoll.subscribe("policy-donated").tree[0]
    copies.append(("newest", int(newest[5, 7])))
    return copies


def reuse_frozen() -> list[str]:
    """Publish frozen weights together with others.

    Return which arrays of each version are reused from the previous one.
    """
    first, second = (
        NamedSharding(Mesh(np.array(jax.devices()[some : some + 2]), "x"), PartitionSpec("x")) for some in (0, 2)
    )
    tree = {name: jax.device_put(jnp.full(1 << 18, 7, jnp.float32), first) for name in ("frozen", "head")}
    tree["small"] = jax.device_put(jnp.full(2, 7, jnp.float32), first)
    tree["tied"] = tree["frozen"]
    update = jax.jit(lambda head: head + 1, donate_argnums=0)
    former, found = None, []
    for step in range(4):
        number = atoll.publish("policy-frozen", tree, checksums=True)
        version = atoll.subscribe("policy-frozen", second, version=number, reuse=former, verify=step % 2 == 1)
        values = [float(version.tree[name][-1]) for name in ("frozen", "head", "small", "tied")]
        assert values == [7, 7 + step, 7, 7]
        assert len(set(map(id, version.tree.values()))) == len(tree), "a computation may donate all leaves"
        if former is not None:
            same = [name for name in tree if version.tree[name] is former.tree[name]]
            found.append(", ".join(same))
        tree["head"] = update(tree["head"])
        former = version
    elsewhere = atoll.subscribe("policy-frozen", first, reuse=former)
    half = atoll.subscribe("policy-frozen", second, dtype=jnp.bfloat16, reuse=former)
    again = atoll.subscribe("policy-frozen", second, dtype=jnp.bfloat16, reuse=half)
    verified = atoll.subscribe("policy-frozen", second, dtype=jnp.bfloat16, reuse=half, verify=True)
    for version in (elsewhere, half, verified):
        assert all(each is not former.tree[name] for name, each in version.tree.items())
        assert all(each is not half.tree[name] for name, each in version.tree.items() if version is not half)
    found.append(", ".join(name for name in tree if again.tree[name] is half.tree[name]))
    update(again.tree["frozen"])
    last = atoll.subscribe("policy-frozen", second, dtype=jnp.bfloat16, reuse=again)
    assert [float(last.tree[name][0]) for name in ("frozen", "tied")] == [7, 7]
    both = jax.jit(lambda one, other: (one + 1, other + 2), donate_argnums=(0, 1))
    assert [float(each[0]) for each in both(last.tree["frozen"], last.tree["tied"])] == [8, 9]
    return found


_frozen: dict[str, Any] = {}  # state of a script between two calls of the following functions


def publish_frozen() -> int:
    """Publish the same large array each time."""
    if "array" not in _frozen:
        place = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), PartitionSpec("x"))
        _frozen["array"] = jax.device_put(jnp.full(1 << 19, 7, jnp.float32), place)
    return atoll.publish("policy-lost", [_frozen["array"]], checksums=True)


def read_frozen(version: int, verify: bool) -> tuple[bool, float]:
    """Read it onto the other devices. Return whether it is the array of the previous version, and its last value."""
    place = NamedSharding(Mesh(np.array(jax.devices()[2:4]), "x"), PartitionSpec("x"))
    former = _frozen.get("version")
    found = atoll.subscribe("trainer/policy-lost", place, version=version, verify=verify, reuse=former)
    _frozen["version"] = found
    is_same = former is not None and found.tree[0] is former.tree[0]
    return is_same, float(found.tree[0][-1])


class Strict:
    """Node of a tree that accepts only arrays."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays
        for each in arrays:
            assert isinstance(each, jax.Array), f"{each} is no array"


class Pair:
    """Node of a tree whose children have the same key."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arrays)


def read_three() -> tuple[list[int], list[float]]:
    """Publish and read three versions. Return how many requests each `subscribe` has waited for, and the values."""
    before, loads, loaded, values = pins.submit, [], list[int](), list[float]()
    pins.submit = lambda *request: loads.append(request) or before(*request)
    try:
        for step in range(3):
            number = atoll.publish("policy-three", {"w": jnp.full((3, 5), float(step))})
            loads.clear()
            values.append(float(atoll.subscribe("policy-three", version=number).tree["w"][2, 4]))
            loaded.append(len(loads))
    finally:
        pins.submit = before
    return loaded, values


def refusals() -> list[str]:
    """Return the errors of arguments that no version can contain, and of trees."""
    jax.tree_util.register_pytree_node(Strict, lambda node: (node.arrays, None), lambda _, arrays: Strict(*arrays))
    jax.tree_util.register_pytree_with_keys(
        Pair,
        lambda pair: (tuple((jax.tree_util.DictKey("same"), each) for each in pair), None),
        lambda _, two: Pair(*two),
    )
    array = jnp.ones(3)
    number = atoll.publish(
        "policy-arguments", [Strict(array), {"\ud800": array}], keep=np.int8(2), replicas=np.int32(1)
    )
    assert (
        atoll.subscribe(
            "policy-arguments", version=np.int64(number), newer_than=-7, like=[Strict(array), {"\ud800": 0}]
        ).number
        == number
    )
    found = []
    for call in (
        lambda: atoll.publish("policy-arguments", array, keep=0),
        lambda: atoll.publish("policy-arguments", array, keep=65),
        lambda: atoll.publish("policy-arguments", array, replicas=1 << 70),
        lambda: atoll.publish("policy-arguments", Pair(array, array)),
        lambda: atoll.publish("policy-arguments", {"a": array, "b": "text"}),
        lambda: jax.jit(lambda x: atoll.publish("policy-arguments", x))(array),
        lambda: atoll.subscribe("policy-arguments", version=-1),
        lambda: atoll.subscribe("policy-arguments", version=1 << 70),
        lambda: atoll.subscribe("policy-arguments", newer_than=1 << 70, wait=0.0),
        lambda: atoll.subscribe("policy-arguments"),
    ):
        try:
            found.append(str(call()))
        except (StatusError, ValueError, TypeError) as error:
            found.append(str(error))
    return found


def publish_deleted() -> list[str]:
    """Publish trees of small and of large arrays, one of which was deleted or donated. Return the errors."""
    found = []
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    for shape in ((4,), (64, 128)):
        for end in (lambda x: x.delete(), donate):
            for dtype in (None, jnp.bfloat16):
                arrays = [jnp.full(shape, float(i)) for i in range(array_packing.FEWEST)]
                end(arrays[7])
                try:
                    atoll.publish("policy-deleted", {"w": arrays}, dtype=dtype)
                except TypeError as error:
                    found.append(str(error))
    return found


@pytest.fixture(scope="module")
def trainer(shared: StandingCluster, start_python: StartPython) -> RemotePython:
    """Return a script that tests share, each of which publishes other names."""
    return python_of(start_python, shared, "trainer")


@pytest.fixture(scope="module")
def rollouts(shared: StandingCluster, start_python: StartPython) -> RemotePython:
    """Return a script that tests share, and that has no arrays between them."""
    return python_of(start_python, shared, "rollouts")


def python_of(start_python: StartPython, cluster: StandingCluster, name: str) -> RemotePython:
    return start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=TOKENS[name])


def check(cluster: StandingCluster, token: str = TOKENS["cluster"]) -> list[str]:
    """Return the contradictions that `atoll check` finds."""
    reply = request_check(parse_address(cluster.address), token)
    return [*reply.contradictions, *reply.differences]


# ---- the tests


def test_another_tenant_reads_a_version_on_another_island_with_other_shardings(
    shared: StandingCluster, start_python: StartPython
) -> None:
    trainer, rollouts = (python_of(start_python, shared, name) for name in ("trainer", "rollouts"))
    number = trainer.call(publish, 7)
    assert rollouts.call(read) == (number, [7.0], [2, 3])
    assert rollouts.call(convert) == ("bfloat16", "int64")
    trainer.call(publish_half)
    assert rollouts.call(read_half) == ("bfloat16", [float(i + 1) for i in range(8)], [0, 1, 2])
    trainer.close()
    assert rollouts.call(read) == (number, [7.0], [2, 3])  # the script has ended
    rollouts.close()
    assert check(shared) == []


def test_small_arrays_are_read_with_any_shardings(
    shared: StandingCluster, trainer: RemotePython, rollouts: RemotePython
) -> None:
    number = trainer.call(publish_small, 100)
    held = [each["arrays"] for each in shared.report()["versions"] if each["name"] == "policy-small"]
    assert held == [2 + 2 + 1 + 2], "packs of 32 arrays, a large one, and the checksums on two sets of devices"
    for first, cut in ((2, (None, "y")), (0, ("y", None)), (2, ())):
        wanted = (number, True, [str(PartitionSpec(*cut))])
        assert rollouts.call(read_small, 100, first, cut) == wanted
    assert check(shared) == []


def test_small_arrays_are_unpacked_when_they_are_used(
    shared: StandingCluster, trainer: RemotePython, rollouts: RemotePython
) -> None:

    def arrays() -> int:
        (count,) = [each["arrays"] for each in shared.report()["sessions"] if each["tenant"] == "rollouts"]
        return int(count)

    trainer.call(publish_small, 100)
    rollouts.call(drop_all)
    before = arrays()
    rollouts.call(keep_small)
    assert arrays() - before == 2 + 2 + 1, "packs of 32 arrays, and a large one"
    assert check(shared) == []
    assert rollouts.call(use_one) == list(range(104, 112))
    assert rollouts.call(donate_one) == (106.0, [True, False])
    assert check(shared) == []
    assert arrays() - before >= 31 + 31 + 1, "one pack of each shape is unpacked"
    rollouts.call(drop_all)
    shared.until(lambda report: arrays() == before, SECONDS)
    assert check(shared) == []


def test_versions_with_the_same_types_are_read_with_one_executable(
    shared: StandingCluster, trainer: RemotePython
) -> None:
    assert trainer.call(read_three) == ([2, 1, 1], [0.0, 1.0, 2.0])
    assert check(shared) == []


def test_a_pinned_version_exists_until_it_is_released(shared: StandingCluster, trainer: RemotePython) -> None:
    values, refused = trainer.call(pin_first)
    assert values == "values [1.0]"
    assert refused.endswith("of policy-pinned was released")
    shared.until(
        lambda report: (
            [each["state"] for each in report["versions"] if each["name"] == "policy-pinned"] == ["complete"]
        ),
        SECONDS,
    )
    assert check(shared) == []


def test_arrays_that_a_script_donates_after_it_has_published_them_are_copied_at_once(
    shared: StandingCluster, trainer: RemotePython
) -> None:
    assert trainer.call(count_arrays) == [
        ("step", 8),
        ("step", 9),
        ("copied", 1),
        ("step", 10),
        ("copied", 1),
        ("step", 11),
        ("newest", 10),
    ]
    assert check(shared) == []


def test_arrays_that_are_published_again_are_not_received_again(shared: StandingCluster, trainer: RemotePython) -> None:
    assert trainer.call(reuse_frozen) == [*["frozen, tied"] * 3, "frozen, head, tied"]
    assert check(shared) == []


@pytest.mark.parametrize("verify", [False, True])
def test_arrays_that_were_lost_are_received_again(
    shared: StandingCluster, start_python: StartPython, verify: bool
) -> None:
    trainer, rollouts = (python_of(start_python, shared, name) for name in ("trainer", "rollouts"))
    assert rollouts.call(read_frozen, trainer.call(publish_frozen), verify) == (False, 7.0)
    assert rollouts.call(read_frozen, trainer.call(publish_frozen), verify) == (True, 7.0)
    restarts = shared.report()["islands"][1]["restarts"]
    shared.worker(1).send_signal(signal.SIGKILL)
    shared.until(lambda report: report["islands"][1]["restarts"] > restarts, SECONDS)
    assert rollouts.call(read_frozen, trainer.call(publish_frozen), verify) == (False, 7.0)
    trainer.close()
    rollouts.close()
    assert check(shared) == []


def test_wrong_arguments_are_errors_and_the_session_continues(shared: StandingCluster, trainer: RemotePython) -> None:
    expected = [
        "keep must be from 1 to 2147483647, not 0",
        "a name can keep 1 to 64 versions, not 65",
        f"replicas must be from 1 to 2147483647, not {1 << 70}",
        "two arrays of the tree to publish as policy-arguments have the same path",
        "['b'] is of type str: publish arrays, numbers and bytes",
        "the array is traced: call atoll.publish outside jit",
        "versions are numbered from 1: policy-arguments has no version -1",
        f"versions are numbered from 1: policy-arguments has no version {1 << 70}",
        "trainer/policy-arguments does not have a version newer than",
        "policy-arguments has other nodes than dicts with strings as keys, lists and tuples",
    ]
    for text, part in zip(trainer.call(refusals), expected, strict=True):
        assert part in text
    assert check(shared) == []


def test_arrays_that_were_deleted_are_errors_that_name_them(shared: StandingCluster, trainer: RemotePython) -> None:
    assert trainer.call(publish_deleted) == ["['w'][7] has been deleted or donated"] * 8
    assert not [each for each in shared.report()["versions"] if each["name"] == "policy-deleted"]
    assert check(shared) == []


def test_a_tenant_without_the_permission_reads_and_publishes_nothing(
    shared: StandingCluster, start_python: StartPython, trainer: RemotePython
) -> None:
    eve = python_of(start_python, shared, "eve")
    trainer.call(publish, 7)
    with pytest.raises(RemoteError, match=r"PERMISSION_DENIED: tenant eve may not read trainer/policy"):
        eve.call(read)
    with pytest.raises(RemoteError, match=r"PERMISSION_DENIED: tenant trainer may not publish secret"):
        trainer.call(publish, 7, "secret")
    with pytest.raises(RemoteError, match=r"DEADLINE_EXCEEDED: eve/policy does not have a version yet"):
        eve.call(read, "policy", None, None, 0.1)
    eve.close()


def test_a_publisher_that_is_killed_at_any_moment_leaves_whole_versions(
    shared: StandingCluster, start_python: StartPython
) -> None:
    rollouts = python_of(start_python, shared, "rollouts")
    newest = 0
    for round_ in range(2 * TIMES):
        trainer = python_of(start_python, shared, "trainer")
        newest = trainer.call(publish, 1000 * round_)
        trainer.begin(publish_for_ever, 1000 * round_ + 1)
        for number, values in rollouts.call(read_many, 5, newest):
            assert len(values) == 1, f"version {number} is a mixture of {values}"
        trainer.process.kill()
        trainer.close()
        number, values, _ = rollouts.call(read)
        assert number > newest
        assert len(values) == 1
    rollouts.close()
    assert check(shared) == []


def test_the_loss_of_an_island_is_named(shared: StandingCluster, start_python: StartPython) -> None:
    trainer, rollouts = (python_of(start_python, shared, name) for name in ("trainer", "rollouts"))
    number = trainer.call(publish, 7)
    restarts = shared.report()["islands"][0]["restarts"]
    shared.worker(0).send_signal(signal.SIGKILL)
    shared.until(lambda report: report["islands"][0]["restarts"] > restarts, SECONDS)
    with pytest.raises(RemoteError, match=rf"version {number} of trainer/policy was on island 0, which failed"):
        rollouts.call(read, "trainer/policy", None, number)
    trainer.close()
    trainer = python_of(start_python, shared, "trainer")
    following = trainer.call(publish, 8)
    assert rollouts.call(read) == (following, [8.0], [2, 3])
    trainer.close()
    rollouts.close()
    assert check(shared) == []


@pytest.mark.parametrize("name", ["_packing", "_unpacking"])
def test_an_island_that_fails_while_a_function_for_packs_is_compiled_is_an_error_of_atoll(
    shared: StandingCluster, start_python: StartPython, name: str
) -> None:
    trainer = python_of(start_python, shared, "trainer")
    expected = ["UNAVAILABLE: island 1 failed, and restarts", Details(Kind.ISLAND, (1,), retriable=True)]
    assert trainer.call(small_while_an_island_fails, name) == expected
    trainer.close()


def test_versions_survive_the_loss_of_the_controller(
    journaled_cluster: StandingCluster, start_python: StartPython
) -> None:
    one, other = (start_python(ATOLL_ADDRESS=journaled_cluster.address) for _ in range(2))
    number = one.call(publish, 7)
    controller = next(each for name, each in journaled_cluster.processes().items() if "controller_main" in name)
    controller.kill()
    assert other.call(read, "policy") == (number, [7.0], [2, 3])
    assert one.call(publish, 8) == number + 1
    assert other.call(read, "policy", number) == (number + 1, [8.0], [2, 3])
    one.close()
    other.close()
