"""Tests of profiles by plugin programs: pathwaysutils' `profileRequest`, and queries of Atoll's plug-in."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from atoll.errors import OK, Code, Status
from atoll.protocol import messages as m
from atoll.protocol import profiles as p
from atoll.protocol.ifrt import executables_pb2
from atoll.protocol.questions import ProfileQuestion, write_question
from tests.ifrt.rig import Rig, check_refused

HOSTS = 2  # of the rig's cluster, each with two devices
BUSY = Status(int(Code.FAILED_PRECONDITION), "host 1 has been recording")
GONE = Status(int(Code.DATA_LOSS), "island 1 is lost")


def plugin(payload: bytes) -> Any:
    compile_ = executables_pb2.Compile()
    compile_.program.type_name = "xla::ifrt::PluginProgram"
    compile_.program.data = b"__serialized_plugin_program " + payload
    return compile_


def profile_request(**fields: Any) -> Any:
    content = {"traceLocation": "/logs", "maxNumHosts": 8, "includeResourceManagers": True} | fields
    return plugin(json.dumps({"profileRequest": content}).encode())


def advanced(**value: Any) -> Any:
    return {"xprofTraceOptions": {"pwTraceOptions": {"advancedConfiguration": {"x": value}}}}


def queries(sent: list[Any]) -> list[tuple[int, int, p.Request]]:
    """Return the queries as (query, device, content)."""
    assert all(isinstance(each, m.Query) and each.what == "profile" for each in sent)
    return [(each.query, each.device, p.decode(each.payload)) for each in sent]


def answer(rig: Rig, *statuses: Status) -> list[tuple[int, p.Request]]:
    """Reply to all queries of the session. Return their devices and contents."""
    asked = queries(rig.take())
    assert len(asked) == len(statuses)
    for (query, *_), status in zip(asked, statuses, strict=True):
        rig.receive(m.QueryReply(query, status, b""))
    return [(device, request) for _, device, request in asked]


def run(rig: Rig, executable: int, status_handle: int, **fields: Any) -> Any:
    return rig.ask(
        "execute", executable=executable, options={"fill_status": True}, status_handle=status_handle, **fields
    )


def outcome(rig: Rig, status_handle: int) -> Any:
    return rig.ask("fetch_execute_result", status_handle=status_handle)


def test_a_program_starts_at_its_first_run_and_writes_at_its_second(rig: Rig) -> None:
    options = {"traceSessionName": "run-7", "hostTraceLevel": 1, "pwTraceOptions": {"enablePythonTracer": True}}
    compiled = rig.ask("compile", profile_request(xprofTraceOptions=options, maxDurationSecs=2)).compile
    directory = "/logs/plugins/profile/run-7"
    for number, request in (
        (1, p.Start(p.Recording(host_tracer_level=1, seconds=2))),
        (2, p.Collect(directory=directory)),
    ):
        run(rig, compiled.executable, 70 + number, results=[number])
        rig.settle()
        sent = rig.take()
        asked = queries([each for each in sent if isinstance(each, m.Query)])
        assert [(device, what) for _, device, what in asked] == [(0, request), (2, request)]
        (launch,) = (each for each in sent if isinstance(each, m.Launch))
        assert launch.results == (number,)
        assert rig.session.arrays.spec(number).dtype == "string"
        assert msgspec.msgpack.decode(rig.cluster.uploads[-1][2]) == [directory.encode()]
        for query, *_ in asked:
            rig.receive(m.QueryReply(query, OK, b""))
        assert outcome(rig, 70 + number).WhichOneof("kind") == "fetch_execute_result"


def test_a_program_without_options_has_no_outputs_and_profiles_as_many_hosts_as_it_says(rig: Rig) -> None:
    compiled = rig.ask("compile", profile_request(maxNumHosts=1)).compile
    response = run(rig, compiled.executable, 70)
    assert not response.execute.outputs
    rig.settle()
    assert [device for device, _ in answer(rig, OK)] == [0]
    assert outcome(rig, 70).WhichOneof("kind") == "fetch_execute_result"


def test_where_a_host_refuses_the_others_drop_what_they_have_begun(rig: Rig) -> None:
    compiled = rig.ask("compile", profile_request()).compile
    run(rig, compiled.executable, 70)
    rig.settle()
    answer(rig, OK, BUSY)
    assert answer(rig, OK) == [(0, p.Collect())]
    check_refused(outcome(rig, 70), Code.FAILED_PRECONDITION, "host 1 has been recording")
    run(rig, compiled.executable, 71)  # starts, since it was not started before
    rig.settle()
    assert [type(request) for _, request in answer(rig, OK, GONE)] == [p.Start] * HOSTS
    assert outcome(rig, 71).WhichOneof("kind") == "fetch_execute_result"


def test_what_a_client_releases_unended_is_dropped(rig: Rig) -> None:
    compiled = rig.ask("compile", profile_request()).compile
    run(rig, compiled.executable, 70)
    rig.settle()
    answer(rig, OK, OK)
    rig.ask("executable_destruct", executable=compiled.executable)
    assert [request for _, _, request in queries(rig.take())] == [p.Collect()] * HOSTS


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"traceLocation": "logs"}, "relative"),
        ({"traceLocation": "http://there"}, "cannot write a profile"),
        ({"traceLocation": 7}, "cannot be read"),
        ({"maxNumHosts": 0}, "cannot be read"),
        ({"maxDurationSecs": -1}, "cannot be read"),
        ({"xprofTraceOptions": {"hostTraceLevel": 99}}, "cannot be read"),
        ({"xprofTraceOptions": {"traceSessionName": "../x"}}, "invalid profile name"),
        (advanced(int64Value="y"), "cannot be read"),
        (advanced(int64Value=10**30), "cannot be read"),
        (advanced(int64Value="9" * 5000), "cannot be read"),
        (advanced(stringValue="x" * 5000), "cannot be read"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(rig: Rig, fields: Any, text: str) -> None:
    check_refused(rig.ask("compile", profile_request(**fields)), Code.INVALID_ARGUMENT, text)


def test_the_plug_in_learns_of_hosts_that_have_no_profile(rig: Rig) -> None:
    asked = rig.send("compile", plugin(write_question(ProfileQuestion(p.Collect(callback=4)))))
    assert answer(rig, GONE, OK) == [(0, p.Collect(callback=4)), (2, p.Collect(callback=4))]
    response = rig.answer(asked)
    assert json.loads(response.compile.fingerprint_value) == {"reasons": {"0": "island 1 is lost"}}


def test_the_plug_in_has_nothing_written_by_hosts(rig: Rig) -> None:
    asked = rig.send("compile", plugin(write_question(ProfileQuestion(p.Collect(directory="/etc")))))
    check_refused(rig.answer(asked), Code.INVALID_ARGUMENT, "sent to the client")


def test_without_any_host_a_profile_is_refused(rig: Rig) -> None:
    asked = rig.send("compile", plugin(write_question(ProfileQuestion(p.Start()))))
    answer(rig, GONE, GONE)
    check_refused(rig.answer(asked), Code.DATA_LOSS, "island 1 is lost")
