"""Tests of a session's other services, with hosts and client on separate machines and TLS."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.machines.bed import Machines
from tests.machines.clusters import MachineCluster, Process
from tests.machines.plugin import long, make_machines  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), long]

PYTHON = """
    import os, time
    import jax, numpy as np
    from jax.experimental import colocated_python
    from atoll.data import Batches

    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = jax.device_put(np.arange(4, dtype=np.float32), sharding)

    @colocated_python.colocated_python
    def add_sum(x):
        print("on", os.uname().nodename, "process", jax.process_index(), "of", jax.process_count(), flush=True)
        print("sees", sorted(os.listdir("/tmp")), flush=True)
        return jax.jit(lambda x: x + x.sum())(x)

    print("sum", np.asarray(add_sum(x)).tolist())

    def read(shard):
        for step in range(2):
            yield np.full(2, 10.0 * step + shard.index)

    print("batches", [batch.tolist() for batch in Batches(read, sharding)])
"""


@pytest.fixture
def cluster(make_machines: Callable[..., Machines]) -> Iterator[MachineCluster]:  # noqa: F811
    """Start an island of two hosts on m1 and m2, with the controller on m0. m3 is for scripts."""
    with MachineCluster(make_machines(4), "1x2x2", None) as cluster:
        yield cluster
        print(cluster.log())  # pytest shows this output if the test fails


@pytest.fixture
def hosts(cluster: MachineCluster) -> list[Process]:
    """Start the host agents. Return them by rank."""
    agents = [cluster.host(f"m{rank + 1}", "--rank", str(rank)) for rank in range(2)]
    cluster.is_up()
    return agents


def python_processes(host: Process) -> list[psutil.Process]:
    """Return a session's Python process on this host, and the process that isolates it."""
    found = psutil.Process(host.pid).children(recursive=True)
    return [each for each in found if "atoll.host_services.python.program.python_main" in each.cmdline()]


def directories(cluster: MachineCluster, machine: str) -> str:
    listing = cluster.start(machine, ["find", "/tmp", "-maxdepth", "2", "-name", "atoll-*"])
    listing.wait()
    return listing.output


def test_python_on_the_hosts_is_one_program_over_machines(cluster: MachineCluster, hosts: list[Process]) -> None:
    script = cluster.script("m3", PYTHON)
    assert script.wait(90) == 0, script.output
    assert "sum [6.0, 7.0, 8.0, 9.0]" in script.output
    assert "batches [[0.0, 0.0, 1.0, 1.0], [10.0, 10.0, 11.0, 11.0]]" in script.output
    for rank, host in enumerate(hosts):
        assert f"on m{rank + 1} process {rank} of 2" in host.output


def test_a_python_process_that_is_lost_is_replaced_on_all_machines(
    cluster: MachineCluster, hosts: list[Process]
) -> None:
    script = cluster.script(
        "m3",
        """
        import os, time
        import jax, numpy as np
        from jax.experimental import colocated_python

        x = jax.device_put(np.arange(4), jax.NamedSharding(jax.make_mesh((4,), ("x",)), jax.P("x")))

        @colocated_python.colocated_python
        def same(x):
            return x

        same = same.specialize(out_specs_fn=lambda x: x)
        print("first", np.asarray(same(x)).tolist())
        while True:
            try:
                print("kept", np.asarray(same(x)).tolist())
            except jax.errors.JaxRuntimeError as error:
                print("lost", str(error).splitlines()[0])
            time.sleep(0.3)
        """,
    )
    script.line(lambda line: line == "kept [0, 1, 2, 3]")
    before = [python_processes(each) for each in hosts]
    for process in before[1]:
        process.kill()
    _, alive = psutil.wait_procs([each for processes in before for each in processes], 30)
    assert not alive  # also on m1, since both were one program
    while not all(python_processes(each) for each in hosts):
        time.sleep(0.1)
    script.line(lambda line: line == "kept [0, 1, 2, 3]", time.monotonic())
    script.end()


def test_what_belongs_to_a_host_ends_with_its_agent(cluster: MachineCluster, hosts: list[Process]) -> None:
    script = cluster.script("m3", PYTHON + '\n    print("stays"); time.sleep(100)\n')
    script.line(lambda line: line == "stays")
    processes = python_processes(hosts[1])
    assert processes
    assert "/tmp/atoll-host-" in directories(cluster, "m2")
    psutil.Process(hosts[1].pid).kill()
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive
    assert directories(cluster, "m2") == ""


def test_callbacks_profiles_and_executables_cross_machines(cluster: MachineCluster, hosts: list[Process]) -> None:
    script = cluster.script(
        "m3",
        """
        import glob, os
        import jax, jax.numpy as jnp, numpy as np
        from jax.experimental import io_callback, serialize_executable

        mesh = jax.make_mesh((4,), ("x",))
        x = jax.device_put(np.arange(4, dtype=np.float32), jax.NamedSharding(mesh, jax.P("x")))
        seen = []

        def here(x):
            seen.append(os.uname().nodename)
            return np.asarray(x) * 2

        def each(x):
            jax.debug.print("shard {}", x)
            y = jax.pure_callback(here, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return y + io_callback(here, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        run = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x")))
        print("called", np.asarray(run(x)).tolist(), set(seen))
        jax.effects_barrier()

        home = jax.device_put(np.asarray(x), jax.local_devices(backend="cpu")[0])
        there = jax.device_put(home + 1, x.sharding)
        print("home", np.asarray(there).tolist())

        compiled = jax.jit(lambda x: jnp.tanh(x).sum()).lower(x).compile()
        again = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
        print("the same", float(again(x)) == float(compiled(x)))

        with jax.profiler.trace("profile"):
            compiled(x).block_until_ready()
        files = sorted(map(os.path.basename, glob.glob("profile/plugins/profile/*/*.xplane.pb")))
        print("profiles", files)
        """,
    )
    assert script.wait(90) == 0, script.output
    assert "called [0.0, 4.0, 8.0, 12.0] {'m3'}" in script.output
    assert sorted(line for line in script.output.splitlines() if line.startswith("shard")) == [
        f"shard [{number}.]" for number in range(4)
    ]
    assert "home [1.0, 2.0, 3.0, 4.0]" in script.output
    assert "the same True" in script.output
    assert "profiles ['host_0.xplane.pb', 'host_1.xplane.pb', 'm3.xplane.pb']" in script.output
