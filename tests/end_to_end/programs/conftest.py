"""What the tests of programs share: a child with JAX on a cluster of two islands."""

from __future__ import annotations

import pytest

from tests.end_to_end.remote_python import RemotePython, StartPython


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python("2x1x4")
