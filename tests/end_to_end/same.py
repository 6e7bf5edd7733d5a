"""Compare two results bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(got: Any, expected: Any) -> None:
    """Fail unless both are the same tree of arrays and plain values, with bitwise equal arrays."""
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for name in expected:
            assert_same(got[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        if expected.dtype.kind == "T":
            assert got.tolist() == expected.tolist()
        elif got.tobytes() != expected.tobytes():
            np.testing.assert_array_equal(got, expected)
            raise AssertionError("equal numbers in different bits")
    else:
        assert got == expected
