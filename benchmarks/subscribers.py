"""How many subscribers of one version get it in which time, and what the publisher sends, in virtual time.

A version of 1 GiB is on a null host. Clients on other null hosts subscribe at the same time, and each host is an
island. The result depends only on the model and on the measured costs, so the same code gives the same figures.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.harness.backends import ROOT
from benchmarks.harness.machine import Machine, describe
from benchmarks.harness.pages import write_between
from benchmarks.harness.provenance import describe_commit

RESULT = ROOT / "benchmarks" / "results" / "subscribers.json"
PAGE = ROOT / "docs" / "design" / "named-arrays.md"
BEGIN, END = "<!-- subscribers: begin (written by benchmarks.subscribers) -->", "<!-- subscribers: end -->"
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_ARRAYS = 8
_MODEL = "tpu-v3"
_GIB = 1 << 30


class Subscription(msgspec.Struct, frozen=True):
    """The result for one number of subscribers. Sent bytes are in multiples of the size of the version.

    Attributes:
      last: seconds until the last subscriber had the version.
      direct: seconds that the link of the publisher needs to send the version to each of them.
      published: sent by the publisher.
      most: sent by the subscriber that has sent the most.
    """

    subscribers: int
    last: float
    direct: float
    published: float
    most: float


class Subscriptions(msgspec.Struct, frozen=True):
    started: str
    machine: Machine
    nbytes: int
    arrays: int
    model: str
    subscriptions: list[Subscription]


def subscribers(output: Annotated[Path, typer.Option("--json", help="File for the result.")] = RESULT) -> None:
    """Let up to 64 null hosts subscribe to one version, in virtual time."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found = [subscribe(count, _GIB, _ARRAYS) for count in _COUNTS]
    result = Subscriptions(started, describe(), _GIB, _ARRAYS, _MODEL, found)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(table(result))
    if output == RESULT:
        write_page()


def subscribe(count: int, nbytes: int, arrays: int) -> Subscription:
    """Let `count` hosts subscribe to a version at the same time."""
    from atoll.devices.null.model import MODELS
    from atoll.devices.null.null_program import NullProgram
    from atoll.session.bare import BareClient, call, program, sharded
    from atoll.virtual.cluster import VirtualCluster
    from benchmarks.paper.costs import measured_costs

    model, costs = MODELS[_MODEL], measured_costs()
    cluster = VirtualCluster(f"{count + 1}x1x1", model, costs)
    publisher, readers = cluster.client(), [cluster.client() for _ in range(count)]
    each = nbytes // arrays

    async def publish() -> None:
        devices = publisher.islands[0]
        spec, output = sharded(devices, each), (("uint8", (each,)),)
        function = await publisher.compile(NullProgram("make", 0.0, (), output), devices)
        nodes = [call(function, [], [spec], devices) for _ in range(arrays)]
        make = publisher.register(program("make", [], nodes, range(arrays)))
        made = await publisher.launch(make, [], arrays)
        await publisher.wait(made)
        await publisher.publish("policy", made)

    async def read(client: BareClient, island: int) -> float:
        targets = [sharded(client.islands[island], each)] * arrays
        return await client.when_ready(await client.subscribe("policy", targets))

    cluster.run(publish())
    began = cluster.now()
    times = cluster.run_all([read(client, 1 + i) for i, client in enumerate(readers)])
    sent = [cluster.sent_bytes(host) / nbytes for host in range(count + 1)]
    direct = count * nbytes / costs.limit(model).dcn_bandwidth
    return Subscription(count, round(max(times) - began, 6), round(direct, 6), sent[0], max(sent[1:]))


def table(result: Subscriptions) -> str:
    """Return the result as a Markdown table."""
    lines = [
        f"`python -m benchmarks subscribers`, {result.started[:10]}, {describe_commit(result.machine.commit)}: "
        f"{result.nbytes / _GIB:g} GiB in {result.arrays} arrays, in virtual time with the model `{result.model}` and "
        f"measured costs.",
        "",
        "| subscribers | sent by the publisher, versions | most sent by a subscriber, versions "
        "| until the last one has it, s | if the publisher sent to all of them, s |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.subscribers} | {each.published:g} | {each.most:g} | {each.last:.3f} | {each.direct:.3f} |"
        for each in result.subscriptions
    ]
    return "\n".join(lines)


def write_page(page: Path = PAGE, result: Path = RESULT) -> None:
    """Put the table of a committed result between the markers of a page."""
    write_between(page, BEGIN, END, table(msgspec.json.decode(result.read_bytes(), type=Subscriptions)))
