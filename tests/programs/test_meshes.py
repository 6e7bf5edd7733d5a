"""Devices that a user names in one of several ways, as meshes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from atoll.errors import PipelineError
from atoll.programs.meshes import mesh_of

DEVICE = jax.devices()[0]
MESH = Mesh(np.array([DEVICE]).reshape(1, 1), ("data", "model"))


@pytest.mark.parametrize("given", [DEVICE, [DEVICE], SimpleNamespace(devices=[DEVICE], shape=(1,))])
def test_devices_and_slices_are_meshes_of_one_axis(given: Any) -> None:
    assert mesh_of(given, "stage 0", PipelineError).axis_names == ("data",)


def test_a_mesh_keeps_its_axes() -> None:
    assert mesh_of(MESH, "stage 0", PipelineError).axis_names == ("data", "model")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("cpu", "stage 3 is 'cpu', and has to be"),
        ([], "stage 3 is"),
        (SimpleNamespace(devices=[DEVICE] * 4, shape=(2, 2)), "say what its dimensions are"),
    ],
)
def test_what_is_no_mesh_is_refused(given: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        mesh_of(given, "stage 3", PipelineError)
