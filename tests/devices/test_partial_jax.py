"""Tests that processes with CPU devices start JAX without a search for plug-ins."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from atoll.devices.partial_jax import partial_jax

_OPEN = """
import json, os, sys
read = []
names = ("METADATA", "PKG-INFO", "entry_points.txt")
sys.addaudithook(lambda event, found: event == "open" and str(found[0]).endswith(names) and read.append(str(found[0])))
import atoll.worker.worker_main as worker_main
from atoll.cluster.processes.startup_heartbeat import StartupHeartbeat
from atoll.worker.worker_options import WorkerOptions
backend = worker_main.open_devices(WorkerOptions("", "", 0, 0, 2, os.getppid()), StartupHeartbeat(-1))
sys.stdout.write(json.dumps([len(backend.devices), read]))
sys.stdout.flush()
os._exit(0)
"""


def _run(script: str) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_worker_with_cpu_devices_reads_the_metadata_of_no_package() -> None:
    assert json.loads(_run(_OPEN)) == [2, []]


def test_other_platforms_find_their_plugins() -> None:
    search = importlib.metadata.distributions
    with partial_jax("cuda"):
        assert importlib.metadata.distributions is search


def test_only_the_search_is_hidden_and_only_within_the_block() -> None:
    with partial_jax("cpu"):
        assert not list(importlib.metadata.distributions())
        assert not importlib.metadata.entry_points(group="jax_plugins")
        assert importlib.metadata.version("jax")
    assert list(importlib.metadata.distributions())


def test_an_error_within_the_block_ends_it() -> None:
    def fail() -> None:
        with partial_jax("cpu"):
            raise ValueError("JAX cannot start")

    with pytest.raises(ValueError, match="JAX cannot start"):
        fail()
    assert list(importlib.metadata.distributions())


_PARTIAL = """
import os, sys, threading
from atoll.devices.partial_jax import partial_jax
with partial_jax("cpu"):
    import jax
    import jax._src.array
    assert jax.config.jax_platforms == "cpu" and jax.errors.JaxRuntimeError and jax.devices()
    assert not hasattr(jax, "__wrapped__")
assert jax.__version__ and "jax._src.numpy" not in sys.modules and "jax.numpy" not in sys.modules
found = []
start = threading.Barrier(8)

def use():
    start.wait()
    found.append(float(jax.jit(lambda x: jax.numpy.sum(x) + 1)(jax.numpy.ones(3))))

threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [4.0] * 8, found
assert type(jax) is type(os) and jax is sys.modules["jax"]
try:
    jax.no_such_name
except AttributeError as error:
    assert str(error) == "module 'jax' has no attribute 'no_such_name'", error
"""


def test_the_first_use_of_an_operation_imports_the_rest_of_jax_for_all_threads() -> None:
    _run(_PARTIAL)


def test_a_process_that_has_imported_jax_keeps_it() -> None:
    import jax

    with partial_jax("cpu"):
        assert sys.modules["jax"] is jax
        assert jax.numpy


def test_a_failed_import_of_the_rest_of_jax_is_tried_again() -> None:
    _run("""
import sys
from atoll.devices.partial_jax import defer_operations
defer_operations()
import jax
sys.modules["jax.numpy"] = None  # so that it cannot be imported
try:
    jax.jit
except ImportError:
    del sys.modules["jax.numpy"]
assert float(jax.jit(lambda x: x + 1)(1)) == 2
""")


_REGISTERED = """
import json, os, sys
import jaxlib.xla_client as xc

found = []
for name in ("register_custom_call_target", "register_custom_call_as_batch_partitionable"):
    def register(target, *arguments, name=name, own=getattr(xc, name), **options):
        found.append(name + " " + (target if isinstance(target, str) else target.decode()))
        return own(target, *arguments, **options)
    setattr(xc, name, register)
{start}
sys.stdout.write(json.dumps(found))
sys.stdout.flush()
os._exit(0)
"""


def test_a_worker_registers_all_custom_calls_that_jax_registers() -> None:
    """Compare the calls of the process in which a worker opens its devices with those of one that imports JAX."""
    worker = set(json.loads(_run(_REGISTERED.format(start=_OPEN.partition("sys.stdout")[0]))))
    full = set(json.loads(_run(_REGISTERED.format(start="import jax"))))
    assert "register_custom_call_target lapack_sgetrf_ffi" in full
    assert full <= worker
