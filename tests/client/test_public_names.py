"""Tests of the names that `import atoll` provides, and of its tree of errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import atoll
from atoll import errors


def kinds() -> list[type[Exception]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, atoll.AtollError)]


@pytest.mark.parametrize("name", atoll.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    public: Any = getattr(atoll, name)
    assert name.startswith("__") or public.__doc__


@pytest.mark.parametrize("kind", kinds())
def test_every_error_is_public_and_drawn_in_the_tree(kind: type[Exception]) -> None:
    assert kind.__name__ in atoll.__all__
    assert errors.__doc__ is not None
    assert f"{kind.__name__}" in errors.__doc__
    assert getattr(atoll, kind.__name__) is kind
    if kind is not atoll.StatusError:  # its constructor needs more than a message
        assert errors.error_kind(kind.__name__) is kind


@pytest.mark.parametrize("name", ["data", "elastic", "errors", "ffi", "testing"])
def test_the_modules_of_the_api_are_attributes(name: str) -> None:
    assert getattr(atoll, name).__name__ == f"atoll.{name}"


def test_errors_slices_and_connect_need_neither_jax_nor_the_controller() -> None:
    code = """
import sys, atoll
atoll.ProgramError, atoll.Slice, atoll.VirtualDeviceSet, atoll.connect, atoll.trace, atoll.Span
print([name for name in ("jax", "atoll.controller") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")
