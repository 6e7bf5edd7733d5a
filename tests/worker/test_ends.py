"""Which ends of runs have to be awaited, and in which order."""

from __future__ import annotations

from typing import Any

from atoll.errors import Code, StatusError
from atoll.worker.ends import Deletions, RunEnd, outcome


class Token:
    """A run's completion: notes that it was waited for, and fails where it should."""

    def __init__(self, name: str, waited: list[str], *, fails: bool = False) -> None:
        self.name, self.waited, self.fails = name, waited, fails

    def block_until_ready(self) -> None:
        self.waited.append(self.name)
        if self.fails:
            raise StatusError(Code.INTERNAL, self.name)


def end(token: Any = None, outputs: tuple[object, ...] = ("made",), devices: tuple[int, ...] = (0, 1)) -> RunEnd:
    return RunEnd(token, outputs, Deletions(), devices)


def test_a_run_that_a_later_one_needs_on_all_of_its_devices_need_not_be_awaited():
    made = object()
    assert end(outputs=(made,)).is_within(("other", made), (0, 1))


def test_a_run_that_a_later_one_does_not_need_everywhere_is_awaited():
    made = object()
    assert not end(outputs=(made,)).is_within(("other",), (0, 1))
    assert not end(outputs=(made,)).is_within((made,), (0,))
    assert not end(outputs=()).is_within((made,), (0, 1))


def test_the_last_run_is_awaited_first_and_the_first_error_is_told():
    waited: list[str] = []
    tokens = [Token("a", waited), Token("b", waited, fails=True), Token("c", waited, fails=True)]
    failure = outcome([end(token) for token in tokens])
    assert waited == ["c", "b", "a"]
    assert failure is not None
    assert "b" in failure.message
