"""Tests that executables without a program reject arguments, and queries about their program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from atoll.errors import Code, StatusError
from atoll.executables.loaded_executable import ExecutableWithoutProgram

NO_CLUSTER: Any = None  # rejections need no cluster
EXECUTABLE = ExecutableWithoutProgram("profile", (3,))


@pytest.mark.parametrize(
    "query",
    [
        lambda: EXECUTABLE.program(frozenset(), False, 0),
        lambda: asyncio.run(EXECUTABLE.cost(NO_CLUSTER, None)),
        lambda: asyncio.run(EXECUTABLE.text(NO_CLUSTER)),
    ],
)
def test_queries_for_the_program_are_refused(query: Callable[[], object]) -> None:
    with pytest.raises(StatusError, match="a profile executable has no program") as caught:
        query()
    assert caught.value.status.code == Code.UNIMPLEMENTED


def test_arguments_are_refused() -> None:
    EXECUTABLE.check([])
    argument: Any = object()
    with pytest.raises(StatusError, match="a profile executable takes no arguments, but 1 were passed") as caught:
        EXECUTABLE.check([argument])
    assert caught.value.status.code == Code.INVALID_ARGUMENT
