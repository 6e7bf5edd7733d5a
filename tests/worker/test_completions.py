"""Which completions of runs have to be awaited, and in which order."""

from __future__ import annotations

from typing import Any

from atoll.errors import Code, StatusError
from atoll.worker.completions import DeletionGuard, RunCompletion, wait_for


class Token:
    """A run's completion: notes that it was waited for, and fails where it should."""

    def __init__(self, name: str, waited: list[str], *, fails: bool = False) -> None:
        self.name, self.waited, self.fails = name, waited, fails

    def block_until_ready(self) -> None:
        self.waited.append(self.name)
        if self.fails:
            raise StatusError(Code.INTERNAL, self.name)


def completion(
    token: Any = None, outputs: tuple[object, ...] = ("made",), devices: tuple[int, ...] = (0, 1)
) -> RunCompletion:
    return RunCompletion(token, outputs, DeletionGuard(), devices)


def test_a_run_that_a_later_one_needs_on_all_of_its_devices_need_not_be_awaited():
    made = object()
    assert completion(outputs=(made,)).is_implied_by(("other", made), (0, 1))


def test_a_run_that_a_later_one_does_not_need_everywhere_is_awaited():
    made = object()
    assert not completion(outputs=(made,)).is_implied_by(("other",), (0, 1))
    assert not completion(outputs=(made,)).is_implied_by((made,), (0,))
    assert not completion(outputs=()).is_implied_by((made,), (0, 1))


def test_the_last_run_is_awaited_first_and_the_first_error_is_reported():
    waited: list[str] = []
    tokens = [Token("a", waited), Token("b", waited, fails=True), Token("c", waited, fails=True)]
    failure = wait_for([completion(token) for token in tokens])
    assert waited == ["c", "b", "a"]
    assert failure is not None
    assert "b" in failure.message
