"""Tests of polling the cluster once for all viewers, and of reporting missing replies."""

from __future__ import annotations

import asyncio

from atoll.cluster.usage.usage_records import By
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


def test_usage_is_asked_for_once_by_all_who_look_and_once_for_each_kind():
    source = ScriptedSource()
    poller = Poller(source)

    async def look() -> None:
        for _ in range(3):
            assert await poller.usage(By.TENANT, 3600.0) == {"by": "tenant", "since": 3600.0}
        assert await poller.usage(By.PROGRAM, 3600.0) == {"by": "program", "since": 3600.0}

    asyncio.run(look())
    assert source.asked == 2


def test_usage_that_cannot_be_had_is_a_problem():
    source = ScriptedSource()
    source.fails = "nobody is there"
    poller = Poller(source)
    assert asyncio.run(poller.usage(By.TENANT, 0.0)) is None
    assert poller.watch.problem == "nobody is there"
