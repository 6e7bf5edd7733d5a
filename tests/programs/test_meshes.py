"""Tests of converting a user's specification of devices to meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from atoll.errors import PipelineError
from atoll.programs.meshes import mesh_of


@functools.cache
def device() -> jax.Device:
    return jax.devices()[0]


@pytest.mark.parametrize("given", [device, lambda: [device()], lambda: SimpleNamespace(devices=[device()], shape=(1,))])
def test_devices_and_slices_are_meshes_of_one_axis(given: Callable[[], Any]) -> None:
    assert mesh_of(given(), "stage 0", PipelineError).axis_names == ("data",)


def test_a_mesh_keeps_its_axes() -> None:
    mesh = Mesh(np.array([device()]).reshape(1, 1), ("data", "model"))
    assert mesh_of(mesh, "stage 0", PipelineError).axis_names == ("data", "model")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: "cpu", "stage 3 is 'cpu': expected a"),
        (list, "stage 3 is"),
        (lambda: SimpleNamespace(devices=[device()] * 4, shape=(2, 2)), "name its dimensions"),
    ],
)
def test_what_is_no_mesh_is_refused(given: Callable[[], Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        mesh_of(given(), "stage 3", PipelineError)
