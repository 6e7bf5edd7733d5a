"""Tests of hosts that cannot reach each other, while the controller can reach all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import MachineCluster
from tests.machines.plugin import long, machines, make_machines  # noqa: F401
from tests.machines.test_hosts_on_machines import LEASE, LOOP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# An array that moves from one island to the other and back, and that no cache keeps.
TO_AND_FRO = """
    import time
    import jax, jax.numpy as jnp

    first, second = jax.devices()
    add = jax.jit(lambda x: x + 1)
    number = 0
    while True:
        try:
            x = jax.device_put(jnp.full(8, number), first)
            y = jax.device_put(add(jax.device_put(add(x), second)), first)
            print("right" if y.tolist() == [number + 2] * 8 else f"WRONG {y}")
        except jax.errors.JaxRuntimeError as error:
            print("lost", str(error).replace(chr(10), " "))
        number += 1
        time.sleep(0.1)
"""

Make = Callable[..., MachineCluster]


@pytest.fixture
def make_cluster(make_machines: Callable[..., Machines], program_cache: Path) -> Iterator[Make]:  # noqa: F811
    made: list[MachineCluster] = []

    def make(count: int, islands: str) -> MachineCluster:
        made.append(MachineCluster(make_machines(count), islands, None, "--lease", str(LEASE)))
        return made[-1]

    yield make
    for each in made:
        print(each.atoll("status").output, each.log(), sep="\n")
        each.__exit__()


def divide(bed: Machines, one: str, other: str, both_ways: bool) -> float:
    """Interrupt the connection of two machines. Return the time."""
    if both_ways:
        bed.drop_both(one, other)
    else:
        bed.drop(one, other)
    return time.monotonic()


@long
@pytest.mark.parametrize("both_ways", [True, False])
def test_two_hosts_of_an_island_that_cannot_hear_each_other_are_both_named_and_no_program_is_blamed(
    make_cluster: Make, both_ways: bool
) -> None:
    cluster = make_cluster(4, "1x2x2")
    hosts = [cluster.host("m1", "--rank", "0"), cluster.host("m2", "--rank", "1")]
    cluster.is_up()
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line == "kept 140.0")
    struck = divide(cluster.bed, "m1", "m2", both_ways)
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    print("lost after", lost - struck, text)
    assert "hosts 0 and 1 of island 0 have not heard each other" in text
    assert "on m1" in text
    assert "on m2" in text
    assert lost - struck < LEASE + 3
    cluster.bed.heal()
    back, _ = script.line(lambda line: line == "kept 140.0", lost)
    print("back after", back - lost)
    assert back - lost < cluster.restart_seconds(10)
    assert "refused" not in script.output
    assert all(each.process.poll() is None for each in hosts)


@long
def test_an_island_whose_hosts_were_divided_for_long_is_back_soon_after_they_hear_each_other(
    make_cluster: Make,
) -> None:
    cluster = make_cluster(4, "1x2x1")
    cluster.host("m1", "--rank", "0")
    cluster.host("m2", "--rank", "1")
    cluster.is_up()
    script = cluster.script("m3", LOOP)
    script.line(lambda line: line == "kept 140.0")
    divide(cluster.bed, "m1", "m2", both_ways=True)
    time.sleep(30)
    cluster.bed.heal()
    healed = time.monotonic()
    back, _ = script.line(lambda line: line == "kept 140.0", healed)
    print("back after", back - healed)
    assert back - healed < cluster.restart_seconds(5)
    assert "refused" not in script.output


@long
def test_of_three_hosts_the_two_that_cannot_hear_each_other_are_found_though_neither_is_the_first(
    make_cluster: Make,
) -> None:
    cluster = make_cluster(4, "1x3x1")
    for rank in range(3):
        cluster.host(f"m{rank + 1}", "--rank", str(rank))
    cluster.is_up()
    script = cluster.script("m0", LOOP.replace("8.0", "6.0"))
    script.line(lambda line: line == "kept 55.0")
    struck = divide(cluster.bed, "m2", "m3", both_ways=True)
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    print("lost after", lost - struck, text)
    assert "hosts 1 and 2 of island 0 have not heard each other" in text
    assert lost - struck < LEASE + 3
    cluster.bed.heal()
    script.line(lambda line: line == "kept 55.0", lost)
    assert "refused" not in script.output


@long
def test_two_hosts_that_cannot_hear_each_other_for_less_than_the_lease_lose_nothing(make_cluster: Make) -> None:
    cluster = make_cluster(3, "1x2x1")
    cluster.host("m1", "--rank", "0")
    cluster.host("m2", "--rank", "1")
    cluster.is_up()
    script = cluster.script("m0", LOOP)
    script.line(lambda line: line == "kept 140.0")
    cluster.bed.drop_both("m1", "m2")
    time.sleep(LEASE - 2)
    cluster.bed.heal()
    healed = time.monotonic()
    script.line(lambda line: line == "kept 140.0", healed + LEASE)
    assert "lost" not in script.output


@long
def test_islands_that_cannot_hear_each_other_fail_what_goes_between_them_and_nothing_else(make_cluster: Make) -> None:
    cluster = make_cluster(4, "2x1x1")
    hosts = [cluster.host("m1", "--rank", "0"), cluster.host("m2", "--rank", "1")]
    cluster.is_up()
    script = cluster.script("m3", TO_AND_FRO)
    script.line(lambda line: line == "right")
    alone = cluster.script("m3", "import jax\njax.config.update('jax_default_device', jax.devices()[0])" + LOOP_ALONE)
    alone.line(lambda line: line == "right")
    struck = divide(cluster.bed, "m1", "m2", both_ways=True)
    lost, text = script.line(lambda line: line.startswith("lost"), struck)
    print("lost after", lost - struck, text)
    assert "host 0" in text
    assert "host 1" in text
    assert lost - struck < LEASE + 6
    # The next gangs do not wait for the silence again. Three gangs depend on each other, and each takes a second or
    # two.
    again, text = script.line(lambda line: line.startswith("lost"), lost + 1)
    print("again after", again - lost, text)
    assert again - lost < 8
    cluster.bed.heal()
    healed = time.monotonic()
    back, _ = script.line(lambda line: line == "right", healed)
    print("back after", back - healed)
    assert back - healed < 10
    assert "WRONG" not in script.output
    assert "lost" not in alone.output
    assert [island["restarts"] for island in cluster.status()["islands"]] == [0, 0]
    assert all(each.process.poll() is None for each in hosts)


LOOP_ALONE = """
import time
import jax.numpy as jnp
while True:
    print("right" if float(jnp.ones(4).sum()) == 4 else "WRONG")
    time.sleep(0.1)
"""
