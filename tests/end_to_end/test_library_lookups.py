"""Tests of libraries' device lookups. docs/guides/libraries.md lists the libraries.

Functions without `test_` in their names run in a child, on two islands of two hosts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.errors import SettingsError
from tests.end_to_end.remote_python import RemotePython, StartPython


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python("2x2x1")


def hosts() -> Any:
    """Return the devices' hosts, as Orbax, MaxText and Tunix find them."""
    devices = jax.devices()
    return (
        [(each.virtual_task_index, each.slice_index) for each in devices],
        Counter(each.task_id for each in devices),
        [(int(re.search(r"[,(]logical_task=(\d+)", repr(each))[1]), each.slice_index) for each in devices],  # type: ignore[index]
    )


def test_each_host_has_a_key(python: RemotePython) -> None:
    keys, tasks, named = python.call(hosts)
    assert keys == named == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert tasks == {0: 1, 1: 1, 2: 1, 3: 1}


def hardware_numbers() -> list[int | None]:
    return [device.local_hardware_id for device in [*jax.devices(), *jax.local_devices(backend="cpu")]]


def test_devices_have_their_number_on_their_host(start_python: StartPython) -> None:
    python = start_python("2x1x2", JAX_NUM_CPU_DEVICES="3")
    assert python.call(hardware_numbers) == [0, 1, 0, 1, 0, 1, 2]


def limits() -> list[int]:
    return [device.memory_stats()["bytes_limit"] for device in jax.devices()]


def test_the_memory_of_every_device_has_a_limit(python: RemotePython) -> None:
    found = python.call(limits)
    assert len(found) == 4
    assert min(found) > 1 << 20


def by_platform() -> Any:
    """Return the results of the lookups of Keras, chex, Levanter, Transformers and NumPyro."""
    devices, host = jax.devices(), jax.local_devices(backend="cpu")
    assert jax.default_backend() == "cpu"
    assert jax.local_device_count() == len(jax.local_devices()) == len(devices)
    assert jax.devices(jax.default_backend()) == jax.devices(backend="cpu") == devices
    assert all(each in jax.devices(each.platform) for each in devices)
    assert jax.device_count("cpu") == jax.local_device_count("cpu") == len(devices)
    assert not set(host) & set(devices)
    x = jax.device_put(jnp.arange(3), jax.devices("cpu")[3])
    called = jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct((3,), x.dtype), x)
    with jax.default_device(host[0]):
        here = jnp.arange(3) + 1
    return list(x.devices()) == devices[3:], called.tolist(), list(here.devices()) == host


def test_cpu_is_the_platform_of_the_cluster(python: RemotePython) -> None:
    assert python.call(by_platform) == (True, [1, 2, 3], True)


def parallel_chains() -> Any:
    """Run one chain per device, as NumPyro does."""

    def chain(key: Any) -> Any:
        return jax.lax.scan(lambda x, key: (x + jax.random.normal(key), x), 0.0, jax.random.split(key, 5))[0]

    keys = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    ends = jax.pmap(chain)(keys)
    return [len(ends.devices()), np.array_equal(ends, [jax.jit(chain)(key) for key in keys])]


def test_chains_run_in_parallel_on_the_devices_of_all_islands(python: RemotePython) -> None:
    assert python.call(parallel_chains) == [4, True]


def first_lookup() -> tuple[bool, bool]:
    return jax.devices("cpu") == jax.devices(), jax.devices("cpu") == jax.devices()


def test_cpu_is_the_platform_of_the_cluster_at_the_first_use_of_jax(start_python: StartPython) -> None:
    assert start_python("1x1x2").call(first_lookup) == (True, True)


def of_the_script() -> tuple[int, int, int, bool]:
    found = jax.devices("cpu")
    return len(found), jax.device_count("cpu"), jax.device_count(), found == jax.local_devices(backend="cpu")


def test_cpu_can_be_the_script(start_python: StartPython) -> None:
    python = start_python("1x1x2", ATOLL_CPU_DEVICES="script", JAX_NUM_CPU_DEVICES="3")
    assert python.call(of_the_script) == (3, 3, 2, True)


def wrong_setting() -> str:
    os.environ["ATOLL_CPU_DEVICES"] = "both"
    try:
        jax.devices("cpu")
    except SettingsError as error:
        return str(error)
    finally:
        del os.environ["ATOLL_CPU_DEVICES"]
    return ""


def test_another_setting_is_an_error(python: RemotePython) -> None:
    assert python.call(wrong_setting) == "ATOLL_CPU_DEVICES is 'both': expected cluster or script"
