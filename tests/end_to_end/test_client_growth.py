"""Test that the memory of a client does not grow with the number of its calls."""

from __future__ import annotations

import pytest

from tests.scripts import RunScript

# `tests/ifrt/test_ifrt_session.py` tests how many stacks a client keeps.
pytestmark = pytest.mark.thorough

# Measured on two cores: 20 bytes per call on an idle machine, and up to 105 on a busy one. If jaxlib keeps the stacks
# of its requests, a client grows by 500 bytes per call.
BYTES_A_CALL = 200

SCRIPT = """
import resource
import jax, jax.numpy as jnp
import numpy as np

step = jax.jit(lambda x: x + 1)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def run(calls):
    x = jnp.zeros(4)
    for i in range(calls):
        x = step(x)
        if i % 20 == 0:
            x.block_until_ready()  # jaxlib's client starts a thread for each call that it waits for
        if i % 100 == 0:
            y = jax.device_put(np.ones(4), jax.devices()[-1])
            np.asarray(y)
            y.delete()
    x.block_until_ready()


run(3000)
before = resident()
run(12000)
print((resident() - before) // 12000)
"""


def test_a_client_does_not_grow_with_its_calls(run_script: RunScript) -> None:
    grown = int(run_script(SCRIPT, islands="1x1x2").check().stdout)
    assert grown < BYTES_A_CALL
