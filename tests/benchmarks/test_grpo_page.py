"""Tests that the page about named arrays shows the committed rewards of post-training."""

from __future__ import annotations

from benchmarks.grpo import BEGIN, END, PAGE, read, table
from benchmarks.harness.pages import between


def test_the_page_shows_the_committed_rewards() -> None:
    assert between(PAGE.read_text(), BEGIN, END).strip() == table(read())
