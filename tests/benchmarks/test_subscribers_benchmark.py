"""Tests of one version's subscribers in virtual time: the figures, and the page that shows them."""

from __future__ import annotations

import msgspec

from benchmarks.subscribers import PAGE, RESULT, Subscriptions, subscribe, table


def test_three_subscribers_get_a_version_and_the_publisher_sends_it_twice() -> None:
    result = subscribe(3, 1 << 20, 2)
    assert (result.subscribers, result.published, result.most) == (3, 2, 1)
    assert result.last < result.direct + 0.01


def test_the_page_shows_the_committed_result() -> None:
    result = msgspec.json.decode(RESULT.read_bytes(), type=Subscriptions)
    rows = [line for line in table(result).splitlines() if line.startswith("|")]
    assert "\n".join(rows) in PAGE.read_text()
    assert {each.subscribers: each.published for each in result.subscriptions}[64] <= 2
