"""Bundles for bug reports: what is known of a cluster, in one file, without secrets. And their replay.

A bundle is a gzipped tar file:

    bundle.json    versions, the system, and the reason for each part that is missing
    status.json    the report of `atoll status --json`
    events.jsonl   the controller's event log (`atoll dump`): placeholders replace tokens and secrets. If its beginning
                   is missing, the journal instead, which begins with a state of the controller
    check.txt      the differences that `atoll check` found
    why.txt        the explanation of `atoll why` for each session
    log, log.1     the log of the cluster, if this user started it on this machine
    run.json       its start and end
    settings.json  the environment variables of Atoll, JAX and XLA that are set, without secrets
"""

from __future__ import annotations

import io
import os
import platform
import re
import sys
import tarfile
import tempfile
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec

from atoll._version import __version__
from atoll.cluster.cluster_runs import ClusterRun
from atoll.cluster.printable import printable_text
from atoll.controller_process.journal_dump import dump_of_journal
from atoll.decodable import decodable
from atoll.errors import AtollError, ClusterError, JournalError
from atoll.journal.event_log import Header
from atoll.operate.log_replay import replay
from atoll.operate.why import explanation
from atoll.protocol.actions import Log, Send
from atoll.protocol.messages import PROTOCOL, CheckReply
from atoll.quantities import human_bytes
from atoll.telemetry.snapshot import Snapshot

MAX_LOG_BYTES = 4 << 20  # of each file of the log: its end
MAX_EVENT_BYTES = 256 << 20  # of an event log that is read
_MAX_HEADER_BYTES = 1 << 20  # of `bundle.json`
HIDDEN = "(hidden)"
_SECRET_NAME = re.compile("TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL|JOIN|AUTHORITY", re.IGNORECASE)
_SHOWN = ("ATOLL_", "JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE", "PJRT_", "TF_CPP_")
_JOIN_TOKEN = re.compile(rb"atoll://[^\s\"']+")
_PACKAGES = ("jax", "jaxlib", "numpy", "msgspec", "cryptography", "uvloop", "ray", "nicegui")


class BundleHeader(msgspec.Struct, frozen=True):
    """`bundle.json`. `missing` has the reason for each part that the bundle does not have."""

    made: float
    atoll: str
    protocol: int
    python: str
    system: str
    packages: dict[str, str]
    missing: dict[str, str]


@dataclass(frozen=True)
class Sources:
    """The requests to a cluster. Each raises AtollError if the cluster does not answer."""

    report: Callable[[], bytes]
    dump: Callable[[], bytes]
    check: Callable[[], CheckReply]


Journal = Callable[[], Iterator[bytes]]  # the lines of `controller_process.journal_dump.dump_of_journal`


def write_bundle(
    path: Path,
    sources: Sources | None,
    run: ClusterRun | None,
    environment: Mapping[str, str],
    journal: Journal | None = None,
) -> list[str]:
    """Write a bundle with all parts that are available. Return the reasons for the missing ones. Raises OSError.

    The events of the `journal` are written if those of the controller cannot be replayed, or if no controller is there.
    """
    parts, missing = _parts(sources, run)
    parts["settings.json"] = _settings(environment)
    with tempfile.TemporaryFile() as events:
        if journal is not None and not _has_beginning(parts.get("events.jsonl", b"")):
            _add_journal(journal, events, parts, missing)
        return _write(path, parts, missing, events)


def _has_beginning(dump: bytes) -> bool:
    """Return whether a dump can be replayed."""
    try:
        return not msgspec.json.decode(dump.partition(b"\n")[0], type=decodable(Header)).missing
    except msgspec.MsgspecError:
        return False


def _add_journal(journal: Journal, file: IO[bytes], parts: dict[str, bytes], missing: dict[str, str]) -> None:
    """Write the events of the journal to the file, in place of those of the controller."""
    try:
        for line in journal():
            file.write(without_join_tokens(line) + b"\n")
            if file.tell() > MAX_EVENT_BYTES:
                raise ClusterError(f"it has more than {human_bytes(MAX_EVENT_BYTES)}")
    except (AtollError, OSError) as error:
        file.truncate(0)
        if "events.jsonl" not in parts:
            missing["events.jsonl"] = str(error)
        else:
            missing["the events of the journal"] = str(error)
        return
    parts.pop("events.jsonl", None)
    missing.pop("events.jsonl", None)


def _write(path: Path, parts: dict[str, bytes], missing: dict[str, str], events: IO[bytes]) -> list[str]:
    system = platform.platform()
    header = BundleHeader(time.time(), __version__, PROTOCOL, sys.version, system, dict(_versions()), missing)
    parts = {"bundle.json": msgspec.json.format(msgspec.json.encode(header)), **parts}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in parts.items():
            content = without_join_tokens(content)
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(content), int(header.made), 0o600
            archive.addfile(member, io.BytesIO(content))
        nbytes = events.seek(0, os.SEEK_END)
        if nbytes:
            member = tarfile.TarInfo("events.jsonl")
            member.size, member.mtime, member.mode = nbytes, int(header.made), 0o600
            events.seek(0)
            archive.addfile(member, events)
    return [f"without {name}: {reason}" for name, reason in missing.items()]


def without_join_tokens(content: bytes) -> bytes:
    """Replace join tokens, which a script or a user may have printed to the log."""
    return _JOIN_TOKEN.sub(b"atoll://" + HIDDEN.encode(), content)


def _parts(sources: Sources | None, run: ClusterRun | None) -> tuple[dict[str, bytes], dict[str, str]]:
    parts: dict[str, bytes] = {}
    missing: dict[str, str] = {}
    if sources is None:
        missing["status.json, check.txt, why.txt"] = missing["events.jsonl"] = "no cluster is up"
    else:
        makers: dict[str, Callable[[], bytes]] = {
            "status.json": sources.report,
            "events.jsonl": sources.dump,
            "check.txt": lambda: _check_text(sources.check()),
            "why.txt": lambda: _why_text(sources.report()),
        }
        for name, make in makers.items():
            try:
                parts[name] = make()
            except (AtollError, msgspec.MsgspecError) as error:  # another version may report what this one cannot read
                missing[name] = str(error)
    if run is None:
        missing["log"] = "this user has no log of the cluster on this machine"
        return parts, missing
    for file in (*run.logs, run.record_file):
        try:
            parts[file.name] = _end_of(file)
        except OSError as error:
            missing[file.name] = str(error)
    return parts, missing


def _end_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
        return file.read(MAX_LOG_BYTES)


def _check_text(reply: CheckReply) -> bytes:
    lines = (*reply.contradictions, *reply.differences) or ("no differences",)
    return "".join(f"{line}\n" for line in lines).encode()


def _why_text(report: bytes) -> bytes:
    snapshot = msgspec.json.decode(report, type=decodable(Snapshot))
    texts = ["\n".join(explanation(snapshot, session.id)) for session in snapshot.sessions]
    return "\n\n".join(texts).encode() + b"\n"


def _settings(environment: Mapping[str, str]) -> bytes:
    shown = {
        name: HIDDEN if _SECRET_NAME.search(name) else value
        for name, value in sorted(environment.items())
        if name.startswith(_SHOWN)
    }
    return msgspec.json.format(msgspec.json.encode(shown))


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


# ---- replay


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Attributes:
      version: The version of Atoll that recorded the events.
      events: The number of events.
      messages: The number of messages that the controller sent, by kind.
      log: The lines of its log, each with the seconds since the first event.
    """

    version: str
    events: int
    messages: dict[str, int]
    log: list[str]


def replay_bundle(path: Path, skips: bool = True, max_log: int | None = None) -> Replayed:
    """Handle the events of a bundle, of a file of `atoll dump` or of a journal's directory with this controller.

    Keep the last `max_log` lines of the log, or all. Without `skips`, the event at which the controller failed raises
    its exception. Raises ClusterError if there are no events, or if they cannot be replayed.
    """
    events = 0
    began: float | None = None
    messages: Counter[str] = Counter()
    log: deque[str] = deque(maxlen=max_log)
    with _lines_of(path) as lines:
        first = next(lines, b"")
        try:
            header = msgspec.json.decode(first, type=decodable(Header))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ClusterError(
                f"{path} has no event log ({error}): give a file of `atoll bundle` or `atoll dump`, or the "
                "directory of a journal"
            ) from None
        try:
            for event, actions in replay(chain((first,), lines), skips):
                events += 1
                messages.update(type(action.message).__name__ for action in actions if isinstance(action, Send))
                began = event.seconds if began is None else began
                log.extend(
                    f"{event.seconds - began:.3f} {action.text}" for action in actions if isinstance(action, Log)
                )
        except (ValueError, msgspec.MsgspecError, JournalError) as error:
            text = f"{path} was written by atoll {header.version} and cannot be replayed: {error}"
            raise ClusterError(text) from None
    return Replayed(header.version, events, dict(messages.most_common()), list(log))


@contextmanager
def _lines_of(path: Path) -> Iterator[Iterator[bytes]]:
    """Yield an iterator over the lines of the events, which are not all in memory. Raises ClusterError."""
    try:
        if path.is_dir():
            yield dump_of_journal(path)
        elif not tarfile.is_tarfile(path):
            with open(path, "rb") as file:
                yield file
        else:
            with tarfile.open(path) as archive, _events_of(archive, path) as events:
                yield events
    except (OSError, EOFError, zlib.error, tarfile.TarError, JournalError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error  # tarfile's errors have no strerror
        raise ClusterError(f"cannot read {path}: {reason}") from None


def _why_without_events(archive: tarfile.TarFile) -> str:
    """Return the reason in `bundle.json`, or "". Anybody may have written the file."""
    try:
        file = archive.extractfile("bundle.json")
        header = msgspec.json.decode(file.read(_MAX_HEADER_BYTES) if file else b"", type=decodable(BundleHeader))
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    reason = header.missing.get("events.jsonl", "")
    return reason and f"; the reason when it was written: {printable_text(reason)}"


def _events_of(archive: tarfile.TarFile, path: Path) -> IO[bytes]:
    try:
        member = archive.getmember("events.jsonl")
    except KeyError:
        raise ClusterError(f"{path} has no event log{_why_without_events(archive)}") from None
    if member.size > MAX_EVENT_BYTES:
        raise ClusterError(f"{path}: its event log has {member.size} bytes, more than {MAX_EVENT_BYTES}")
    return archive.extractfile(member) or io.BytesIO()
