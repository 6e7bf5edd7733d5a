"""The cluster is asked once for all who look, and what it does not answer is told."""

from __future__ import annotations

import asyncio

from atoll.protocol.spans import Span
from atoll.web.poller import Poller
from tests.web.cluster import ScriptedSource


def test_many_who_look_at_once_are_one_question():
    source = ScriptedSource(topology="1x1x1")
    poller = Poller(source)

    async def look() -> None:
        await asyncio.gather(*(poller.refresh() for _ in range(20)))

    asyncio.run(look())
    assert (source.asked, poller.watch.snapshot.topology) == (1, "1x1x1")


def test_nobody_who_looks_is_no_question():
    assert ScriptedSource().asked == 0
    source = ScriptedSource()
    Poller(source)
    assert source.asked == 0


def test_a_cluster_that_does_not_answer_is_a_problem_until_it_does():
    source = ScriptedSource(topology="1x1x1")
    source.fails = "nobody is there"
    poller = Poller(source)
    asyncio.run(poller.refresh(0.0))
    assert poller.watch.problem == "nobody is there"
    source.fails = ""
    asyncio.run(poller.refresh(0.0))
    assert (poller.watch.problem, poller.watch.snapshot.topology) == ("", "1x1x1")


def test_what_is_no_report_is_a_problem_and_ends_nothing():
    source = ScriptedSource(islands=3)
    poller = Poller(source)
    asyncio.run(poller.refresh())
    assert "Expected `array`" in poller.watch.problem


def test_only_new_spans_are_asked_for():
    source = ScriptedSource()
    poller = Poller(source)
    source.new = [Span(0, 0, 1, "f", "call", 1, 0, 10, 1, (0,))]
    asyncio.run(poller.refresh_time_line())
    assert (poller.watch.position, len(poller.watch.time_line.rows())) == (1, 1)
