"""Fixture of the tests of programs: a child with JAX on a cluster of two islands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.end_to_end.remote_python import RemotePython


@pytest.fixture(scope="module")
def python(shared_python: Callable[[str], RemotePython]) -> RemotePython:
    return shared_python("2x1x4")
