"""Tests of what a script prints for jaxlib."""

from __future__ import annotations

import pytest

from tests.scripts import RunScript


@pytest.mark.parametrize("settings", [{"TF_CPP_MIN_LOG_LEVEL": "1"}, {"JAX_LOGGING_LEVEL": "WARNING"}])
def test_jaxlib_logs_again_as_it_did_before_it_was_silenced(run_script: RunScript, settings: dict[str, str]) -> None:
    ended = run_script(
        """
        import os
        import numpy as np
        import jax
        from atoll.client.jaxlib_logging import silence_jaxlib, silenced_jaxlib, unsilence_jaxlib

        def transfer():
            with jax.transfer_guard("log"):
                jax.jit(lambda x: x)(np.ones(3))
            os.write(2, b"|")

        transfer()
        silence_jaxlib()
        transfer()
        with silenced_jaxlib():
            transfer()
        transfer()
        unsilence_jaxlib()
        with silenced_jaxlib():
            transfer()
        transfer()
        """,
        env={"JAX_PLATFORMS": "cpu", "ATOLL_TEST_EXECUTED": "1"} | settings,  # jaxlib reads variables at its start
    ).check()
    output = ["host-to-device transfer" in part for part in ended.stderr.split("|")]
    assert output == [True, False, False, False, False, True, False], ended.stderr
