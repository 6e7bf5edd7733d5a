"""Tests of a cluster of null devices: the real control plane, hosts with simulated durations, and clients
without JAX.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.devices.null.null_program import NullProgram
from atoll.errors import Code, StatusError
from atoll.protocol import messages as m
from atoll.session.bare import BareClient, call, program, sharded, transfer
from tests.cluster_process import User

SCALAR = ("uint8", (4,))
DEADLINE = 300.0


@pytest.fixture(scope="module")
def user(module_directory: Path, program_cache: Path) -> Iterator[User]:
    # One test inspects the modules that the processes of islands have loaded.
    with User(module_directory, program_cache, ATOLL_TEST_EXECUTED="null_hosts_main") as user:
        user.atoll("up", "--platform", "null", "--islands", "2x4x2").check()
        yield user
        user.atoll("down").check()


def status(user: User) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(user.atoll("status", "--json").stdout)
    return found


def with_client(user: User, work: Callable[[BareClient], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(DEADLINE):
            client = await BareClient.open(f"unix:{user.runtime}/atoll/default/controller.sock")
            try:
                await work(client)
            finally:
                client.close()

    asyncio.run(body())


async def zeros(client: BareClient, devices: list[int]) -> int:
    function = await client.compile(NullProgram("zeros", 0.0, (), (SCALAR,)), devices)
    node = call(function, (), (sharded(devices),), devices)
    (handle,) = await client.launch(client.register(program("zeros", (), [node], (0,))), (), 1)
    return handle


def test_the_process_of_an_island_has_not_loaded_jax(user: User) -> None:
    for island in status(user)["islands"]:
        for pid in {host["pid"] for host in island["hosts"]}:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "python" in maps
            assert "jaxlib" not in maps


def test_a_chain_over_the_hosts_of_an_island_takes_as_long_as_its_computations(user: User) -> None:
    async def work(client: BareClient) -> None:
        devices = client.islands[0]
        assert len(devices) == 8
        spec, seconds = sharded(devices), 0.02
        step = await client.compile(NullProgram("step", seconds, (SCALAR,), (SCALAR,)), devices)
        chain = client.register(
            program("chain", (spec,), [call(step, (i,), (spec,), devices) for i in range(20)], (20,))
        )
        zero = await zeros(client, devices)
        await client.wait([zero])
        started = time.monotonic()
        results = await client.launch(chain, (zero,), 1)
        await client.wait(results)
        assert time.monotonic() - started >= 20 * seconds

    with_client(user, work)


def test_a_program_whose_plan_goes_to_its_hosts_in_pieces_runs(user: User) -> None:
    """A plan of many nodes is large. A launch waits for it, and the plan is released before it has arrived."""

    async def work(client: BareClient) -> None:
        devices = client.islands[0]
        function = await client.compile(NullProgram("large", 0.0, (), (SCALAR,)), devices)
        node = call(function, (), (sharded(devices),), devices)
        for letter in "ab":
            number = client.register(program(letter, (), [node] * 1024, (0,)))
            await client.when_ready([*await client.launch(number, (), 1), *await client.launch(number, (), 1)])

    with_client(user, work)


def test_what_goes_to_another_island_takes_as_long_as_the_network(user: User) -> None:
    async def work(client: BareClient) -> None:
        here, there = client.islands
        nbytes = 1 << 30  # on each of eight devices: 2 GiB per host, at 12.5 GB/s
        source, target = sharded(here, nbytes), sharded(there, nbytes)
        make = await client.compile(NullProgram("make", 0.0, (), (("uint8", (nbytes,)),)), here)
        made = client.register(program("make", (), [call(make, (), (source,), here)], (0,)))
        move = client.register(program("move", (source,), [transfer(0, target)], (1,)))
        (large,) = await client.launch(made, (), 1)
        await client.wait([large])
        started = time.monotonic()
        moved = await client.launch(move, (large,), 1)
        await client.wait(moved)
        expected = 2 * nbytes / 12.5e9
        assert time.monotonic() - started >= expected

    with_client(user, work)


def test_memory_of_null_devices_is_counted_and_runs_out(user: User) -> None:
    async def work(client: BareClient) -> None:
        devices = client.islands[0]
        large = 17 << 30
        make = await client.compile(NullProgram("make", 0.0, (), (("uint8", (large,)),)), devices)
        number = client.register(program("make", (), [call(make, (), (sharded(devices, large),), devices)], (0,)))
        (handle,) = await client.launch(number, (), 1)
        with pytest.raises(StatusError) as caught:
            await client.wait([handle])
        assert caught.value.status.code == Code.RESOURCE_EXHAUSTED

    with_client(user, work)


@pytest.mark.thorough
def test_what_is_no_null_program_is_refused(user: User) -> None:
    ended = user.script(
        "import jax\n"
        "try:\n"
        "    jax.jit(lambda x: x + 1)(1)\n"
        "except jax.errors.JaxRuntimeError as error:\n"
        "    print(error)\n",
        JAX_PLATFORMS="atoll",
        ATOLL_ADDRESS=f"unix:{user.runtime}/atoll/default/controller.sock",
    )
    assert "UNIMPLEMENTED: null devices run only null programs" in ended.stdout


def test_an_unknown_model_is_an_error_that_names_those_there_are(user: User) -> None:
    ended = user.atoll("up", "--name", "other", "--platform", "null", ATOLL_NULL_MODEL="abacus")
    assert "ATOLL_NULL_MODEL is 'abacus': known are tpu-v3, instant" in ended.error


def test_an_island_whose_process_is_killed_comes_back(user: User) -> None:
    before = status(user)["islands"][1]
    os.kill(before["hosts"][0]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE
    while (island := status(user)["islands"][1])["state"] != "ready" or not island["restarts"]:
        assert time.monotonic() < deadline, island
        time.sleep(0.2)
    assert len({host["pid"] for host in island["hosts"]}) == 1

    async def work(client: BareClient) -> None:
        await client.wait([await zeros(client, client.islands[1])])

    with_client(user, work)


def test_who_lies_about_its_window_loses_its_session_and_others_go_on(user: User) -> None:
    async def step_of(client: BareClient) -> int:
        devices = client.islands[1][:1]
        step = await client.compile(NullProgram("step", 0.002, (), (SCALAR,)), devices)
        return client.register(program("step", (), [call(step, (), (sharded(devices),), devices)], (0,)))

    async def work(honest: BareClient) -> None:
        liar = await BareClient.open(f"unix:{user.runtime}/atoll/default/controller.sock", "liar")
        session, ended = liar._session, asyncio.get_running_loop().create_future()
        session.set_handlers(ended.set_result)
        lies, steps = await step_of(liar), await step_of(honest)
        for _ in range(8 * session.window.size):
            session.send(m.Launch(lies, (), (session.mint(),), (), 0, 1))
        for _ in range(20):
            await honest.wait(await honest.launch(steps, (), 1))
        assert "launches in flight, and launches more" in (await ended).message
        assert [each["label"] for each in status(user)["sessions"]] == ["bare client"]
        await honest.wait(await honest.launch(steps, (), 1))

    with_client(user, work)
