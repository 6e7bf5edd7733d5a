"""Tests that functions to which other code has references call their replacements."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

from atoll.client.jax_patches.redirection import redirect


def module_with(source: str) -> Any:
    module = ModuleType("library_of_the_test")
    exec(source, module.__dict__)
    return module


def negated(original: Any) -> Any:
    @functools.wraps(original)
    def new(*args: Any, **kwargs: Any) -> Any:
        return -original(*args, **kwargs)

    return new


def test_a_python_function_is_redirected_for_who_holds_it() -> None:
    module = module_with("def times(x, by=2, *, plus=0):\n    'Multiplies.'\n    return x * by + plus")
    held = module.times
    new = redirect(held, negated)
    assert (held(3), held(3, 4), held(3, plus=1), new(3)) == (-6, -12, -7, -6)
    assert str(inspect.signature(held)) == "(x, by=2, *, plus=0)"
    assert held.__doc__ == "Multiplies."


def test_a_function_with_a_closure_is_left_as_it_is() -> None:
    factor = 2

    def times(x: int) -> int:
        return x * factor

    assert redirect(times, negated)(3) == -6
    assert times(3) == 6


def test_a_native_function_is_redirected_for_who_holds_it() -> None:
    """Run in another process, because the function remains redirected."""
    script = """
import sys
from jaxlib import _jax
from atoll.client.jax_patches.redirection import FailedCall, redirect

held, seen = _jax.start_transfer_server, []

def wrap(original):
    def new(*args, **kwargs):
        seen.append((args, kwargs))
        return [args, kwargs] if args == (1,) else original(*args, **kwargs)
    return new

new = redirect(held, wrap)
shared = object()
before = sys.getrefcount(shared)
for _ in range(100):
    assert held(1, address=shared) == [(1,), {"address": shared}]
assert sys.getrefcount(shared) - before <= len(seen) + 1
failed = held("no client", max_num_parallel_copies=2)
assert isinstance(failed, FailedCall)
for call in (lambda: failed.address(), lambda: new("no client")):
    try:
        call()
    except TypeError as error:
        assert "incompatible function arguments" in str(error)
    else:
        raise AssertionError("it is called with what it does not take")
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
