"""Fixtures for the TensorFlow front end.

TensorFlow is too large for the extra `test`: `make tensorflow` runs these tests.
"""

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
    """Return a mesh of four devices with the axis `data`."""
    return Mesh(np.array(jax.devices()[:4]), ("data",))


@pytest.fixture
def square() -> Mesh:
    """Return a mesh of four devices with the axes `data` and `model`."""
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
