"""Tests that a host records a profile for one session at a time, and sends it only to that session."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.devices.null.null_backend import NullBackend
from atoll.errors import OK, Code, Status, StatusError
from atoll.host_services.calls.call_messages import ArrayType
from atoll.host_services.profiles.profile_recorder import ProfileRecorder
from atoll.host_services.profiles.xspace import Others
from atoll.protocol import profiles as p
from tests.waiting import until

ALICE, BOB = 3, 4
CONTENT = bytes(range(256)) * 40_000  # more than two parts


class Profiler:
    """Replacement of XLA's profiler, which always records the same data."""

    def __init__(self) -> None:
        self.running = 0
        self.ended = threading.Event()

    def begin(self, recording: p.Recording) -> Any:
        assert not self.running, "XLA has one profiler a process"
        self.running += 1
        return self.end

    def end(self) -> bytes:
        self.running -= 1
        self.ended.set()
        return CONTENT


class Client:
    """Client that receives a host's profile."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int, list[int], bytes]] = []

    def call(self, session: int, callback: int, types: tuple[ArrayType, ...], arrays: Any) -> Any:
        assert [each.dtype for each in types] == ["int64", "uint8"]
        head, part = arrays
        self.taken.append((session, callback, np.frombuffer(head, np.int64).tolist(), bytes(part)))
        return self

    def done(self) -> None:
        pass


@pytest.fixture
def profiler() -> Profiler:
    return Profiler()


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def start(client: Client) -> Iterator[Any]:
    """Create recorders: `start(profiler, client=..., ...)`."""
    made: list[ProfileRecorder] = []

    def start(profiler: Profiler, client: Any = client, **options: Any) -> ProfileRecorder:
        made.append(ProfileRecorder(profiler.begin, lambda session: Others(), client, 5, **options))
        return made[-1]

    yield start
    for recorder in made:
        for session in (ALICE, BOB):
            recorder.close(session)
        recorder._thread.shutdown()
        until(lambda: not [each for each in threading.enumerate() if each.name.startswith("atoll-profile")])


@pytest.fixture
def recorder(start: Any, profiler: Profiler) -> ProfileRecorder:
    recorder: ProfileRecorder = start(profiler)
    return recorder


def ask(recorder: ProfileRecorder, session: int, request: p.Request) -> None:
    hand_over = recorder.handle(session, p.encode(request))
    if hand_over is not None:
        hand_over()


def refused(recorder: ProfileRecorder, session: int, request: p.Request) -> StatusError:
    with pytest.raises(StatusError) as raised:
        ask(recorder, session, request)
    return raised.value


def test_a_profile_goes_to_its_client_in_parts(recorder: ProfileRecorder, client: Client) -> None:
    ask(recorder, ALICE, p.Start())
    ask(recorder, ALICE, p.Stop())
    ask(recorder, ALICE, p.Collect(callback=9))
    assert b"".join(part for *_, part in client.taken) == CONTENT
    assert [(session, callback, head) for session, callback, head, _ in client.taken] == [
        (ALICE, 9, [5, offset, len(CONTENT)]) for offset in range(0, len(CONTENT), 4 << 20)
    ]


def test_a_second_session_is_told_who_is_in_its_way_until_the_first_has_collected(recorder: ProfileRecorder) -> None:
    ask(recorder, ALICE, p.Start())
    error = refused(recorder, BOB, p.Start())
    assert error.status.code == Code.FAILED_PRECONDITION
    assert "host 5 has been recording a profile of another session for 0 s" in error.status.message
    assert "of this session" in refused(recorder, ALICE, p.Start()).status.message
    for request in (p.Stop(), p.Collect(callback=1)):
        assert refused(recorder, BOB, request).status.code == Code.NOT_FOUND
    ask(recorder, ALICE, p.Collect())
    ask(recorder, BOB, p.Start())


def test_what_a_session_has_not_collected_gives_way_to_its_next_profile(
    recorder: ProfileRecorder, client: Client
) -> None:
    ask(recorder, ALICE, p.Start())
    ask(recorder, ALICE, p.Stop())
    assert refused(recorder, BOB, p.Start()).status.code == Code.FAILED_PRECONDITION
    ask(recorder, ALICE, p.Start())
    ask(recorder, ALICE, p.Collect(callback=2))
    assert {callback for _, callback, *_ in client.taken} == {2}


def test_a_profile_ends_with_its_session(recorder: ProfileRecorder, profiler: Profiler) -> None:
    ask(recorder, ALICE, p.Start())
    recorder.close(BOB)
    assert not profiler.ended.is_set()
    recorder.close(ALICE)
    assert profiler.ended.wait(10)
    ask(recorder, BOB, p.Start())


def test_the_end_of_a_session_starts_no_thread_on_a_host_that_was_never_asked_for_a_profile(
    recorder: ProfileRecorder,
) -> None:
    recorder.close(ALICE)
    assert not [each for each in threading.enumerate() if each.name.startswith("atoll-profile")]


def test_a_profile_that_starts_while_its_session_ends_does_not_remain(start: Any, profiler: Profiler) -> None:
    begins, begun = threading.Event(), threading.Event()

    class SlowProfiler(Profiler):
        def begin(self, recording: p.Recording) -> Any:
            begins.set()
            assert begun.wait(10)
            return super().begin(recording)

    recorder = start(SlowProfiler())
    answers: queue.SimpleQueue[Status] = queue.SimpleQueue()
    recorder.submit(ALICE, p.encode(p.Start()), answers.put)
    assert begins.wait(10)
    recorder.close(ALICE)
    begun.set()
    recorder.submit(BOB, p.encode(p.Start()), answers.put)
    assert [answers.get(timeout=10), answers.get(timeout=10)] == [OK, OK]


def test_a_profile_that_nobody_ends_stops_by_itself_and_can_be_collected(
    recorder: ProfileRecorder, profiler: Profiler, client: Client
) -> None:
    ask(recorder, ALICE, p.Start(p.Recording(seconds=0.05)))
    assert profiler.ended.wait(10)
    ask(recorder, ALICE, p.Collect(callback=1))
    assert sum(len(part) for *_, part in client.taken) == len(CONTENT)


def test_a_profile_stops_where_memory_is_short(start: Any, profiler: Profiler, client: Client) -> None:
    recorder = start(profiler, is_memory_short=lambda: True)
    ask(recorder, ALICE, p.Start())
    assert profiler.ended.wait(10)
    ask(recorder, ALICE, p.Collect(callback=1))
    assert sum(len(part) for *_, part in client.taken) == len(CONTENT)


def test_what_is_asked_is_answered_once_whatever_becomes_of_it(recorder: ProfileRecorder) -> None:
    answers: queue.SimpleQueue[Status] = queue.SimpleQueue()
    for request in (
        p.Start(),
        p.Start(),
        p.Stop(),
        p.Collect(callback=1),
        p.Collect(directory="/proc/no/such/directory"),
    ):
        recorder.submit(ALICE, p.encode(request), answers.put)
    recorder.submit(ALICE, b"no request", answers.put)
    codes = sorted(answers.get(timeout=10).code for _ in range(6))
    assert codes == sorted((OK.code, Code.FAILED_PRECONDITION, OK.code, OK.code, Code.NOT_FOUND, Code.INVALID_ARGUMENT))
    assert answers.empty()


def test_a_client_that_does_not_take_its_profile_gets_no_second_one(start: Any, profiler: Profiler) -> None:
    called, go_on = threading.Event(), threading.Event()

    class Slow(Client):
        def call(self, *arguments: Any) -> Any:
            called.set()
            assert go_on.wait(10)
            return super().call(*arguments)

    recorder = start(profiler, Slow())
    ask(recorder, ALICE, p.Start())
    collecting = threading.Thread(target=ask, args=(recorder, ALICE, p.Collect(callback=1)))
    collecting.start()
    assert called.wait(10)
    assert "is still handing over" in refused(recorder, ALICE, p.Start()).status.message
    ask(recorder, BOB, p.Start())
    ask(recorder, BOB, p.Collect())
    go_on.set()
    collecting.join(10)
    ask(recorder, ALICE, p.Start())


def test_a_profile_is_written_once_into_the_directory_of_its_run(recorder: ProfileRecorder, tmp_path: Path) -> None:
    directory = p.directory_of(str(tmp_path / "logs"), "run-1")
    ask(recorder, ALICE, p.Start())
    ask(recorder, ALICE, p.Collect(directory=directory))
    assert (tmp_path / "logs/plugins/profile/run-1/host_5.xplane.pb").read_bytes() == CONTENT
    ask(recorder, ALICE, p.Start())
    with pytest.raises(FileExistsError):
        ask(recorder, ALICE, p.Collect(directory=directory))


def test_a_link_is_not_followed(recorder: ProfileRecorder, tmp_path: Path) -> None:
    directory = Path(p.directory_of(str(tmp_path), "run"))
    directory.mkdir(parents=True)
    (directory / "host_5.xplane.pb").symlink_to(tmp_path / "elsewhere")
    ask(recorder, ALICE, p.Start())
    with pytest.raises(OSError, match="exists"):
        ask(recorder, ALICE, p.Collect(directory=str(directory)))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("location", "run", "text"),
    [
        ("logs", "run", "relative"),
        ("/logs", "../../etc", "invalid profile name"),
        ("/logs", "", "invalid profile name"),
        ("/logs", ".hidden", "invalid profile name"),
        ("/logs/../etc", "run", "is not allowed"),
        ("gs://bucket/../other", "run", "is not allowed"),
        ("/lo\0gs", "run", "invalid location"),
        ("file:///etc", "run", "cannot write a profile"),
        ("http://there/logs", "run", "cannot write a profile"),
        ("gs://", "run", "cannot write a profile"),
        ("simplecache::gs://bucket", "run", "invalid location"),
        ("/" + "x" * 5000, "run", "invalid location"),
    ],
)
def test_a_place_that_is_none_is_refused(location: str, run: str, text: str) -> None:
    with pytest.raises(StatusError, match=text):
        p.directory_of(location, run)


def test_places_are_paths_and_object_stores() -> None:
    assert p.directory_of("/logs/", "r") == "/logs/plugins/profile/r"
    assert p.directory_of("gs://bucket/logs", "2026_01_02") == "gs://bucket/logs/plugins/profile/2026_01_02"


@pytest.mark.parametrize(
    "recording",
    [
        p.Recording(seconds=1e9),
        p.Recording(seconds=0),
        p.Recording(host_tracer_level=9),
        p.Recording(advanced={str(i): 1 for i in range(100)}),
        p.Recording(advanced={"x": "y" * 10_000}),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    recorder: ProfileRecorder, profiler: Profiler, recording: p.Recording
) -> None:
    assert refused(recorder, ALICE, p.Start(recording)).status.code == Code.INVALID_ARGUMENT
    with pytest.raises(StatusError, match="invalid request to the profiler"):
        recorder.handle(ALICE, b"\xc1")
    assert not profiler.running


def test_null_devices_have_no_profiler() -> None:
    with pytest.raises(StatusError, match="UNIMPLEMENTED: null devices"):
        NullBackend.begin_profile(None, p.Recording())  # type: ignore[arg-type]
