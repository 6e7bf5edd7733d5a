"""Tests of bundles for bug reports: what they contain, what they hide, and their replay."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.cluster.cluster_runs import ClusterRun, RunRecord
from atoll.errors import ClusterError, ConnectError, JournalError
from atoll.operate.bug_reports import HIDDEN, Sources, replay_bundle, write_bundle
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from tests.controller.play import Play, runs

SECRET = "c2VjcmV0"


def played() -> Play:
    play = Play("1x1x2")
    play.with_call(name="f")
    play.array(7)
    (run,) = runs(play.send(m.Launch(1, (7,), (8,), ())))
    play.done(run.sequence)
    play.tick(1.0)
    return play


def sources(play: Play) -> Sources:
    return Sources(
        lambda: msgspec.json.encode(report(play.controller)),
        play.controller.log.dump,
        lambda: m.CheckReply((), (), 1, 0),
    )


def run_in(directory: Path) -> ClusterRun:
    run = ClusterRun(directory)
    run.begin(RunRecord("one", started=1.0))
    run.log.write_text(f"joined with atoll://{SECRET}@host:1\n")
    return run


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_a_bundle_has_all_parts_and_no_secret(tmp_path: Path):
    path = tmp_path / "bundle.tar.gz"
    environment = {"ATOLL_TOKEN": SECRET, "ATOLL_JOIN": SECRET, "ATOLL_LEASE": "5", "HOME": "/home/ana"}
    assert write_bundle(path, sources(played()), run_in(tmp_path), environment) == []
    found = contents(path)
    assert set(found) == {
        "bundle.json", "status.json", "events.jsonl", "check.txt", "why.txt", "log", "run.json", "settings.json"
    }  # fmt: skip
    assert SECRET not in "".join(found.values())
    assert found["log"] == f"joined with atoll://{HIDDEN}\n"
    assert json.loads(found["settings.json"]) == {"ATOLL_JOIN": HIDDEN, "ATOLL_LEASE": "5", "ATOLL_TOKEN": HIDDEN}
    assert json.loads(found["bundle.json"])["protocol"] == m.PROTOCOL
    assert path.stat().st_mode & 0o077 == 0


def test_a_part_that_cannot_be_had_is_named_with_the_reason(tmp_path: Path):
    def fails() -> bytes:
        raise ConnectError("the controller does not answer")

    play = played()
    path = tmp_path / "bundle.tar.gz"
    broken = Sources(fails, play.controller.log.dump, sources(play).check)
    assert write_bundle(path, broken, None, {}) == [
        "without status.json: the controller does not answer",
        "without why.txt: the controller does not answer",
        "without log: this user has no log of the cluster on this machine",
    ]
    assert "events.jsonl" in contents(path)


def test_a_report_that_this_version_cannot_read_is_kept_without_its_explanation(tmp_path: Path):
    play = played()
    path = tmp_path / "bundle.tar.gz"
    later = Sources(lambda: b'{"sessions": 3}', play.controller.log.dump, sources(play).check)
    (missing, _) = write_bundle(path, later, None, {})
    assert missing.startswith("without why.txt: ")
    assert contents(path)["status.json"] == '{"sessions": 3}'


@pytest.mark.parametrize("size", [40, 300])
def test_a_part_of_a_bundle_is_an_error(tmp_path: Path, size: int):
    path = tmp_path / "bundle.tar.gz"
    write_bundle(path, sources(played()), None, {})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ClusterError, match="cannot read"):
        replay_bundle(path)


def test_a_bundle_and_a_dump_are_replayed_to_the_same_messages(tmp_path: Path):
    play = played()
    bundle, dump = tmp_path / "bundle.tar.gz", tmp_path / "dump"
    write_bundle(bundle, sources(play), None, {})
    dump.write_bytes(play.controller.log.dump())
    found = replay_bundle(bundle)
    assert found.messages["Run"] == 2, "the upload and the call"
    assert found == replay_bundle(dump)
    assert found.log[0].endswith(" ready: island 0: all of its hosts have joined")
    assert 0.0 <= float(found.log[0].split(" ")[0]) < 60.0, "seconds since the first event"


def test_what_cannot_be_replayed_is_an_error_that_says_why(tmp_path: Path):
    path = tmp_path / "bundle.tar.gz"
    write_bundle(path, None, None, {})
    with pytest.raises(ClusterError, match="has no event log; the reason when it was written: no cluster is up"):
        replay_bundle(path)
    for content in (b"no events", b'{"version": "\xff"}'):
        path.write_bytes(content)
        with pytest.raises(ClusterError, match=r"has no event log .*: give a file of `atoll bundle`"):
            replay_bundle(path)
    play = played()
    header, *rest = play.controller.log.dump().splitlines()
    path.write_bytes(b"\n".join([msgspec.json.encode(json.loads(header) | {"missing": 3}), *rest]))
    with pytest.raises(ClusterError, match="the log lacks 3 events at its start"):
        replay_bundle(path)


def _missing(play: Play) -> bytes:
    """Return the dump of a controller that has dropped its first events."""
    header, *rest = play.controller.log.dump().splitlines()
    return b"\n".join([msgspec.json.encode(json.loads(header) | {"missing": 3}), *rest[3:]])


def test_a_bundle_has_the_events_of_the_journal_if_the_first_ones_are_missing(tmp_path: Path):
    path, play = tmp_path / "bundle.tar.gz", played()
    whole = play.controller.log.dump().splitlines()
    lacking = Sources(sources(play).report, lambda: _missing(play), sources(play).check)
    assert write_bundle(path, lacking, run_in(tmp_path), {}, lambda: iter(whole)) == []
    assert contents(path)["events.jsonl"].encode().splitlines() == whole
    assert replay_bundle(path).messages["Run"] == 2


def test_a_bundle_has_the_events_of_the_controller_if_these_can_be_replayed(tmp_path: Path):
    def unused() -> Iterator[bytes]:
        raise AssertionError

    path, play = tmp_path / "bundle.tar.gz", played()
    assert write_bundle(path, sources(play), run_in(tmp_path), {}, unused) == []
    assert replay_bundle(path).messages["Run"] == 2


def test_a_journal_that_cannot_be_read_is_named_and_leaves_the_events_of_the_controller(tmp_path: Path):
    def broken() -> Iterator[bytes]:
        yield b"{}"
        raise JournalError("it is damaged")

    path, play = tmp_path / "bundle.tar.gz", played()
    lacking = Sources(sources(play).report, lambda: _missing(play), sources(play).check)
    assert write_bundle(path, lacking, run_in(tmp_path), {}, broken) == [
        "without the events of the journal: it is damaged"
    ]
    assert contents(path)["events.jsonl"].encode() == _missing(play)


def test_a_bundle_of_a_cluster_that_was_killed_has_the_events_of_its_journal(tmp_path: Path):
    path, whole = tmp_path / "bundle.tar.gz", played().controller.log.dump().splitlines()
    assert write_bundle(path, None, run_in(tmp_path), {}, lambda: iter(whole)) == [
        "without status.json, check.txt, why.txt: no cluster is up"
    ]
    assert replay_bundle(path).messages["Run"] == 2


def test_only_the_last_lines_of_the_log_are_kept_if_asked_for(tmp_path: Path):
    path, play = tmp_path / "dump", played()
    path.write_bytes(play.controller.log.dump())
    whole = replay_bundle(path)
    assert len(whole.log) > 1
    assert replay_bundle(path, max_log=1).log == whole.log[-1:]


def test_a_bundle_that_does_not_exist_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as raised:
        replay_bundle(tmp_path / "gone")
    assert str(raised.value) == f"cannot read {tmp_path / 'gone'}: No such file or directory"
