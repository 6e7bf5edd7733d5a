"""Many subscribers of one version, in virtual time: what each host sends, and how long all of them take."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atoll.testing import BareClient, NullProgram, VirtualCluster, call, program, sharded

MIB = 1 << 20


async def publish(client: BareClient, nbytes: Sequence[int], name: str = "policy") -> int:
    """Publish arrays of these sizes on the first device of island 0."""
    devices = client.islands[0][:1]
    made = []
    for size in nbytes:
        spec = sharded(devices, size)
        function = await client.compile(NullProgram(f"make {size}", 0.0, (), (("uint8", (size,)),)), devices)
        make = client.register(program("make", [], [call(function, [], [spec], devices)], [0]))
        made += await client.launch(make, [], 1)
    return await client.publish(name, made)


async def subscribe(client: BareClient, island: int, nbytes: Sequence[int]) -> float:
    """Read the version on an island; the time at which it is there."""
    targets = [sharded(client.islands[island][:1], size) for size in nbytes]
    return await client.when_ready(await client.subscribe("policy", targets))


def transferred(subscribers: int, nbytes: Sequence[int]) -> tuple[list[float], list[int]]:
    """Let so many islands subscribe at once; the times of all, and the bytes that each host has sent."""
    cluster = VirtualCluster(f"{subscribers + 1}x1x1")
    publisher, readers = cluster.client("publisher"), [cluster.client() for _ in range(subscribers)]
    cluster.run(publish(publisher, nbytes))
    times = cluster.run_all([subscribe(reader, 1 + i, nbytes) for i, reader in enumerate(readers)])
    return times, [cluster.sent_bytes(host) for host in range(subscribers + 1)]


def test_the_publisher_sends_each_byte_to_two_of_64_subscribers() -> None:
    size = 64 * MIB
    times, sent = transferred(64, [size])
    assert sent[0] <= 2 * size
    assert max(sent) <= 2 * size
    assert sum(sent) == 64 * size, "each subscriber gets each byte once"
    one, _ = transferred(1, [size])
    assert max(times) < 12 * one[0], "a chain takes 64 times as long, and so does the publisher if it sends to all"


@pytest.mark.parametrize("subscribers", [1, 2])
def test_two_subscribers_get_a_version_from_its_publisher(subscribers: int) -> None:
    _, sent = transferred(subscribers, [MIB])
    assert sent == [subscribers * MIB] + [0] * subscribers


def test_arrays_in_several_parts_go_through_a_tree_each() -> None:
    nbytes = [MIB] * 130  # 128 arrays and 2
    _, sent = transferred(8, nbytes)
    assert max(sent) <= 2 * sum(nbytes)
    assert sum(sent) == 8 * sum(nbytes)
