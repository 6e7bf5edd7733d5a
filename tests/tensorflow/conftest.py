"""The front end for TensorFlow. TensorFlow is no part of the extra test, and too large for it: `make tensorflow`."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its sums are in an order of their own


@pytest.fixture
def mesh() -> Mesh:
    """Four devices, as the axis `data`."""
    return Mesh(np.array(jax.devices()[:4]), ("data",))


@pytest.fixture
def square() -> Mesh:
    """Four devices, as the axes `data` and `model`."""
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
