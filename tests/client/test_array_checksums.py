"""Tests of array checksums: they do not depend on shardings, and they name the devices with wrong bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from atoll.client.array_checksums import grid_of

KINDS = ("float32", "bfloat16", "int8", "bool", "complex64", "int4")


@pytest.mark.parametrize(
    ("shape", "grid"),
    [((), ()), ((0,), (1,)), ((7,), (1,)), ((12,), (4,)), ((1024, 512), (8, 8)), ((64, 6, 64), (8, 2, 4))],
)
def test_the_grid_of_a_shape(shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
    assert grid_of(shape) == grid


def _content(jnp: Any, shape: tuple[int, ...], dtype: str) -> Any:
    size = 1
    for each in shape:
        size *= each
    numbers = jnp.arange(size, dtype=jnp.float32) * 0.75 - 3
    return numbers.reshape(shape).astype(dtype)


def _check() -> dict[str, Any]:
    """Return the named devices, out of eight CPU devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from atoll.client.array_checksums import cells_of, checksums, wrong_devices

    devices = np.array(jax.devices())
    publisher = Mesh(devices[:4].reshape(2, 2), ("x", "y"))
    contents = [_content(jnp, (16, 12), kind) for kind in KINDS]
    contents += [_content(jnp, shape, "float32") for shape in ((), (5,), (0, 4))]

    def put(mesh: Any, spec: Any) -> list[Any]:
        places = [NamedSharding(mesh, spec if each.shape == (16, 12) else P()) for each in contents]
        return [jax.device_put(each, place) for each, place in zip(contents, places, strict=True)]

    sums = np.asarray(checksums(put(publisher, P("x", "y"))))
    ends = np.cumsum([cells_of(each.shape) for each in contents])
    assert ends[-1] == len(sums)
    expected = np.split(sums, ends[:-1])
    places = {
        "rows": (Mesh(devices[4:8], "z"), P("z")),
        "columns": (Mesh(devices[4:8], "z"), P(None, "z")),
        "cut cells": (Mesh(devices[4:7], "z"), P(None, "z")),
        "whole": (Mesh(devices[4:6], "z"), P()),
    }
    right, wrong = {}, {}
    for name, place in places.items():
        arrays = put(*place)
        right[name] = wrong_devices(arrays, expected)
        shards = [each.data for each in arrays[0].addressable_shards]
        shards[1] = shards[1].at[(0, 0)].add(1)
        arrays[0] = jax.make_array_from_single_device_arrays(arrays[0].shape, arrays[0].sharding, shards)
        wrong[name] = wrong_devices(arrays, expected)
    arrays[0] = jax.device_put(contents[0][::-1], arrays[0].sharding)
    return {"right": right, "wrong": wrong, "swapped": wrong_devices(arrays, expected)}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_ENABLE_X64": "0"}
    code = "import json; from tests.client.test_array_checksums import _check; print(json.dumps(_check()))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.thorough
def test_other_shardings_have_the_same_checksums(found: dict[str, Any]) -> None:
    assert found["right"] == {"rows": {}, "columns": {}, "cut cells": {}, "whole": {}}


@pytest.mark.thorough
def test_a_wrong_element_names_the_devices_with_its_cell(found: dict[str, Any]) -> None:
    assert found["wrong"] == {
        "rows": {"0": [5]},
        "columns": {"0": [5]},
        "cut cells": {"0": [4, 5, 6]},
        "whole": {"0": [5]},
    }


@pytest.mark.thorough
def test_elements_at_other_places_are_found(found: dict[str, Any]) -> None:
    assert found["swapped"] == {"0": [4, 5]}
