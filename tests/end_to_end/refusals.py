"""Start JAX on Atoll in several environments that it refuses, in one process that tries again each time."""

from __future__ import annotations

import os

import jax


def refusals(*environments: dict[str, str]) -> list[str]:
    """Return the error of each environment, or "" if JAX starts. Only the last one may start."""
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
