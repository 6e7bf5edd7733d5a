"""Why JAX does not start on Atoll in one environment after another: all in one process, which tries again each time."""

from __future__ import annotations

import os

import jax


def refusals(*environments: dict[str, str]) -> list[str]:
    """With what text JAX does not start in each of these; "" where it does, which only the last one may."""
    texts = []
    for environment in environments:
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            jax.devices()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
        os.environ.clear()
        os.environ.update(before)
    assert all(texts[:-1]), texts
    return texts
