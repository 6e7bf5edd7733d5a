"""Tests of reads of published arrays: one executable reads the versions that its runs name."""

from __future__ import annotations

import msgspec

from atoll.errors import OK, Code
from atoll.protocol import messages as m
from atoll.protocol.version_requests import (
    MAX_LAUNCH_ID,
    OpenArrays,
    OpenedArrays,
    ReadArrays,
    write_request,
)
from tests.ifrt.requests.test_profile_requests import plugin
from tests.ifrt.rig import Rig, on

TARGETS = (on(0), on(1))


def load(rig: Rig, request: ReadArrays) -> int:
    loaded: int = rig.ask("compile", plugin(write_request(request))).compile.executable
    return loaded


def reads(rig: Rig) -> list[m.ReadVersion]:
    return [each for each in rig.take() if isinstance(each, m.ReadVersion)]


def test_each_run_reads_the_version_of_the_reader_that_it_names(rig: Rig) -> None:
    executable = load(rig, ReadArrays(TARGETS, 3))
    for reader, results in ((5, [1, 2]), (MAX_LAUNCH_ID, [3, 4])):
        rig.ask("execute", executable=executable, options={"launch_id": reader}, results=results)
        assert reads(rig) == [m.ReadVersion(reader, 3, TARGETS, tuple(results), False)]


def test_a_reader_whose_number_no_run_can_pass_has_its_own_executable(rig: Rig) -> None:
    executable = load(rig, ReadArrays(TARGETS, 0, True, MAX_LAUNCH_ID + 1))
    rig.ask("execute", executable=executable, results=[1, 2])
    assert reads(rig) == [m.ReadVersion(MAX_LAUNCH_ID + 1, 0, TARGETS, (1, 2), True)]


def test_a_negative_number_of_a_reader_is_an_error_of_the_run(rig: Rig) -> None:
    """The controller would end the session of a proxy that sends it."""
    executable = load(rig, ReadArrays(TARGETS))
    op = rig.send("execute", executable=executable, options={"launch_id": -5}, results=[1, 2])
    answer = rig.answer(op)
    assert answer is not None
    assert answer.meta.status.code == Code.INVALID_ARGUMENT
    assert "the launch_id of a run that reads published arrays is -5" in answer.meta.status.message
    assert reads(rig) == []


def test_an_open_version_says_how_many_islands_the_session_had_lost(rig: Rig) -> None:
    for losses in range(2):
        op = rig.send("compile", plugin(write_request(OpenArrays("policy"))))
        (asked,) = (each for each in rig.take() if isinstance(each, m.OpenVersion))
        rig.receive(m.VersionOpened(asked.request, OK, 7, 1, (), b""))
        reply = rig.answer(op)
        assert reply is not None
        opened = msgspec.msgpack.decode(reply.compile.fingerprint_value, type=OpenedArrays)
        assert (opened.reader, opened.losses) == (7, losses)
        rig.receive(m.HostsFailed((1,)))
