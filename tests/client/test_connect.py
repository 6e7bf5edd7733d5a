"""Tests of `atoll.connect` in a notebook: in several cells, and repeatedly."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from atoll.errors import SettingsError
from atoll.operate import operator_requests
from tests.forked_process import EXECUTED, with_forked_children
from tests.scripts import RunScript


def test_a_cluster_stays_connected_over_many_cells_until_it_is_closed(run_script: RunScript) -> None:
    result = run_script(
        """
        import asyncio
        import jax, jax.numpy as jnp
        import atoll

        async def cells():  # a notebook runs its cells in an event loop
            first = atoll.connect(islands="1x1x2")
            print(len(first.devices), first.devices == jax.devices("atoll"), float(jnp.ones(3).sum()))
            with atoll.trace() as spans:
                jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))
            print("call" in [span.kind for span in spans])
            second = atoll.connect(islands="1x1x1")  # the first cell once more
            print(first.is_closed, second.is_closed, len(jax.devices("atoll")), repr(first)[-7:])
            first.close()
            print(second.is_closed, float(jnp.ones(4).sum()))
            kept = jnp.ones(6)
            second.close()
            second.close()
            print(kept.is_deleted())
            del kept  # jaxlib's client would print an error
            print(jax.devices()[0].platform, jax.config.jax_platforms, float(jnp.ones(5).sum()))

        asyncio.run(cells())
        """,
        env={"JAX_PLATFORMS": "cpu"},
    ).check()
    assert result.stdout.splitlines() == [
        "2 True 3.0",
        "True",
        "True False 1 closed)",
        "False 4.0",
        "True",
        "cpu cpu 5.0",
    ]
    assert result.stderr == ""


def test_a_script_that_keeps_compiled_programs_and_trees_ends_in_silence(run_script: RunScript) -> None:
    forks = with_forked_children({"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    result = run_script(
        """
        import numpy as np
        import jax, jax.numpy as jnp
        import atoll

        with atoll.connect(islands="1x1x2"):
            compiled = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
            x = jax.device_put(jnp.ones(4), jax.devices()[1])
            atoll.publish("tree", {"x": x}, checksums=True)
            tree = atoll.subscribe("tree", x.sharding, verify=True)
            print(jax.device_get([x, x])[0].sum())
        print(jnp.ones(5).sum())
        """,
        # A forked script ends without destructors.
        env={**forks, "JAX_PLATFORMS": "cpu", EXECUTED: "script.py"},
    ).check()
    assert result.stdout == "4.0\n5.0\n"
    assert result.stderr == ""


def test_a_cluster_that_cannot_be_reached_is_an_error_of_atolls_and_leaves_jax_as_it_was(run_script: RunScript) -> None:
    result = run_script(
        """
        import jax, jax.numpy as jnp
        import atoll

        for arguments in ({"address": "unix:/nope/x"}, {"address": "nonsense"}, {"islands": "8"}):
            try:
                atoll.connect(**arguments)
            except atoll.AtollError as error:
                print(type(error).__name__, isinstance(error, ValueError))
        print(jax.devices()[0].platform, float(jnp.ones(5).sum()))
        """,
        env={"JAX_PLATFORMS": "cpu"},
    ).check()
    assert result.stdout.splitlines() == [
        "UnreachableError False",
        "AddressError True",
        "SettingsError True",
        "cpu 5.0",
    ]


def test_islands_that_cannot_be_are_refused_before_jax_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.extend.backend.clear_backends", None)
    import atoll

    with pytest.raises(SettingsError, match="expected ISLANDSxHOSTSxDEVICES"):
        atoll.connect(islands="8")


def test_requests_are_made_inside_a_running_event_loop_too() -> None:
    async def reply() -> str:
        return "reply"

    async def cell() -> Any:
        return operator_requests._run(reply())

    assert asyncio.run(cell()) == operator_requests._run(reply()) == "reply"


def test_a_missing_version_on_an_embedded_cluster_is_an_error_that_names_the_variable(run_script: RunScript) -> None:
    script = """
        import atoll

        try:
            atoll.subscribe("policy", wait=0.1)
        except atoll.errors.StatusError as error:
            print(error)
        """
    text = run_script(script).check().stdout
    assert "policy does not have a version yet" in text
    assert "This script runs on its own embedded cluster" in text
    assert "ATOLL_ADDRESS" in text
