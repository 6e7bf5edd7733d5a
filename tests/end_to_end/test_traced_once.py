"""Test that Atoll does not change the keys under which JAX keeps what it has traced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.forked_process import with_forked_children
from tests.scripts import script_environment

SCRIPT = """
    import sys
    import atoll, jax, jax.numpy as jnp, numpy as np

    traces = []

    @jax.jit
    def double(x):
        traces.append(x)
        return x * 2

    x = np.arange(4, dtype=np.float32)
    for _ in range(3):
        double(x)
    print(len(traces), double._cache_size())
    atoll.program(lambda x: double(x) + 1)(x)
    atoll.publish("policy", [jnp.ones(3)])
    atoll.subscribe("policy")
    atoll.make_virtual_device_set().add_slice(devices=1)
    import atoll.pipelines.pipeline_builder
    double(x)
    print(len(traces), double._cache_size(), "jax.extend" in sys.modules)
"""


def test_a_function_is_traced_once_though_its_first_call_starts_the_backend(
    module_directory: Path, program_cache: Path
) -> None:
    # The forked processes of other tests have imported all of JAX before.
    done = subprocess.run(
        [sys.executable, "-c", dedent(SCRIPT)],
        env=with_forked_children(script_environment(module_directory, program_cache, "1x1x1")),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "1 1\n1 1 False\n", done.stderr
