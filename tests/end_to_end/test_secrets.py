"""Tests that no process that runs users' Python, nor any readable file on disk, contains a secret of the cluster.

The cluster has all kinds of secrets: TLS with a certificate authority, tenants with token files, a journal, and join
files. A tenant's colocated Python searches for them. It has masked copies of the secrets, so that it does not find its
own.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from atoll.cluster.tenant_settings import read_tenants, token_hash
from atoll.controller_process.journal_dump import dump_of_journal
from atoll.controller_process.process_state import decode_snapshot
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import recover
from atoll.journal.records import decode_events
from atoll.operate.log_replay import replay
from atoll.operate.operator_requests import request_dump
from atoll.protocol.events import ConnectionOpened
from atoll.security.join_token import host_join_file, join_file, read_join
from atoll.security.start_security import authority_file
from tests.cluster_process import free_port
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

TOKENS = {name: f"the long token of {name} {os.urandom(8).hex()}" for name in ("ana", "ben", "op", "cluster", "host")}
FOREIGN = f"a credential of whoever started the cluster {os.urandom(8).hex()}"
_MASK = 0x5A


def masked(secret: bytes) -> bytes:
    return bytes(each ^ _MASK for each in secret)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a user's files for a cluster: tenants and tokens. The journal will also be there."""
    path = tmp_path_factory.mktemp("secrets")
    lines = []
    for name in ("ana", "ben", "op"):
        (path / f"{name}.token").write_text(TOKENS[name])
        (path / f"{name}.token").chmod(0o600)
        lines.append(f"[tenant.{name}]\ntoken = './{name}.token'\nrole = '{'operator' if name == 'op' else 'user'}'\n")
    (path / "tenants.toml").write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, directory: Path) -> StandingCluster:
    return start_cluster(
        {
            "ATOLL_TEST_EXECUTED": "python_main",
            "ATOLL_KEY_FILE": str(directory / "state" / "key"),
            "ATOLL_HOST_TOKEN": TOKENS["host"],
            "AWS_SECRET_ACCESS_KEY": FOREIGN,
        },
        islands="1x1x2",
        listen=f"tls://127.0.0.1:{free_port()}",
        token=TOKENS["cluster"],
        journal=str(directory / "journal"),
        grace_seconds=5.0,
        tenants=tuple(read_tenants(directory / "tenants.toml")),
    )


@pytest.fixture(scope="module")
def ana(start_python: StartPython, cluster: StandingCluster) -> Iterator[RemotePython]:
    join = read_join(str(join_file(cluster.directory)))
    python = start_python(ATOLL_JOIN=str(replace(join, token=TOKENS["ana"])))
    python.call(double)  # its session is open
    yield python
    python.close()


@pytest.fixture(scope="module")
def secrets(ana: RemotePython, cluster: StandingCluster, directory: Path) -> dict[str, bytes]:
    """Return every secret of the cluster, by name."""
    found = {f"token of {name}": token.encode() for name, token in TOKENS.items() if name != "host"}
    for file in (join_file(cluster.directory), host_join_file(cluster.directory)):
        join = read_join(str(file))
        found[f"string in {file.name}"] = str(join).encode()
        found[f"token in {file.name}"] = join.token.encode()
    pem = authority_file(cluster.directory).read_text()
    found["key of the authority"] = pem[pem.index("PRIVATE KEY") :].splitlines()[1].encode()
    found["the user's key"] = (directory / "state" / "key").read_bytes()
    found["a credential of the environment"] = FOREIGN.encode()
    for number, secret in enumerate(journaled(directory)):
        found[f"secret {number} of a session, host or link"] = secret
    return found


def journaled(directory: Path) -> set[bytes]:
    """Return the secrets of connections and of the shell in the journal, which the holder of the user's key
    can read.
    """
    before = os.environ["ATOLL_KEY_FILE"]
    os.environ["ATOLL_KEY_FILE"] = str(directory / "state" / "key")
    try:
        copy = directory / "copy"
        shutil.copytree(directory / "journal", copy)
        opened = JournalDirectory(copy)
        recovered = recover(opened)
        opened.close()
        shutil.rmtree(copy)
    finally:
        os.environ["ATOLL_KEY_FILE"] = before
    assert recovered is not None
    controller, state = decode_snapshot(recovered.payload)
    peers = controller.connections.peers.values()
    found = {peer.secret.encode() for peer in peers} | {state.key}
    events = [event for turn in recovered.turns for event in decode_events(turn)]
    found |= {event.secret.encode() for event in events if isinstance(event, ConnectionOpened)}
    assert len(found) > 3
    return found


def forms(secrets: dict[str, bytes]) -> list[tuple[str, bytes]]:
    """Return each secret unchanged, in hexadecimal, and in base64."""
    found = []
    for name, secret in secrets.items():
        encoded = {base64.b64encode(secret).rstrip(b"="), base64.urlsafe_b64encode(secret).rstrip(b"=")}
        found += [(name, each) for each in {secret, secret.hex().encode(), *encoded}]
    return found


def within(content: bytes, secrets: dict[str, bytes]) -> list[str]:
    return sorted({name for name, form in forms(secrets) if form in content})


# ---- functions that clients run


def double() -> float:
    import jax.numpy as jnp

    return float(jnp.float32(21) * 2)


def on_a_host(search: Callable[..., list[tuple[str, str]]], *arguments: Any) -> list[tuple[str, str]]:
    """Return the findings of a search in colocated Python, as (place, description)."""
    import cloudpickle
    import jax
    from jax.experimental import colocated_python

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # hosts may not have this file
    size = 1 << 16

    @colocated_python.colocated_python
    def run(x: jax.Array) -> jax.Array:
        text = json.dumps(search(*arguments)).encode()[:size]
        found = np.zeros(size, np.uint8)
        found[: len(text)] = np.frombuffer(text, np.uint8)
        return jax.device_put(found, x.sharding)

    device = jax.devices()[0]
    answer = np.asarray(run(jax.device_put(np.zeros(1, np.uint8), device)))
    return [tuple(each) for each in json.loads(answer.tobytes().rstrip(b"\0"))]


def search_processes(hidden: list[tuple[str, bytes]]) -> list[tuple[str, str]]:
    """Search the environment, arguments, open files and mapped files of each visible process."""
    wanted = [(name, masked(each)) for name, each in hidden]
    found: list[tuple[str, str]] = []

    def look(place: str, content: bytes) -> None:
        found.extend((place, name) for name, each in wanted if each in content)

    def look_into(place: str, path: str) -> None:
        try:
            if os.path.isfile(path) and os.stat(path).st_size < 1 << 26:
                with open(path, "rb") as file:
                    look(place, file.read())
        except OSError:
            pass

    look("os.environ", "\0".join(f"{name}={value}" for name, value in os.environ.items()).encode())
    processes = ["self", *(each for each in os.listdir("/proc") if each.isdigit())]
    for each in processes:
        for name in ("environ", "cmdline"):
            place = f"/proc/{each}/{name}"
            try:
                with open(place, "rb") as file:
                    look(place, file.read())
            except OSError:
                continue
        try:
            for descriptor in os.listdir(f"/proc/{each}/fd"):
                place = f"/proc/{each}/fd/{descriptor}"
                look_into(f"{place} ({os.readlink(place)})", place)
            with open(f"/proc/{each}/maps") as file:
                maps = {line.split(None, 5)[5].strip() for line in file if line.count("/")}
        except OSError:
            continue
        for path in maps:
            if not path.endswith((".so", ".py")) and ".so." not in path:
                look_into(f"/proc/{each}/maps: {path}", path)
    found.append(("processes", str(len(processes) - 1)))
    return found


def search_files(
    hidden: list[tuple[str, bytes]], roots: list[str], skipped: list[str], limit: int
) -> list[tuple[str, str]]:
    """Search regular files below these directories except programs and libraries: at most `limit` files, and 256 MiB in
    all.
    """
    wanted = [(name, masked(each)) for name, each in hidden]
    found: list[tuple[str, str]] = []
    seen = read = nbytes = 0
    for root in roots:
        for directory, names, files in os.walk(root):
            names[:] = [
                each for each in names if os.path.join(directory, each) not in skipped and each not in (".git", "lib")
            ]
            for name in files:
                path = os.path.join(directory, name)
                seen += 1
                try:
                    if not os.path.isfile(path) or os.stat(path).st_size > 1 << 23:
                        continue
                    if seen > limit or nbytes > 1 << 28:
                        break
                    with open(path, "rb") as file:
                        content = file.read()
                except OSError:
                    continue
                read, nbytes = read + 1, nbytes + len(content)
                found.extend((path, name) for name, each in wanted if each in content)
    found.append(("files", str(read)))
    return found


# ---- tests


def hidden(secrets: dict[str, bytes]) -> list[tuple[str, bytes]]:
    return [(name, masked(form)) for name, form in forms(secrets)]


def test_processes_that_users_python_sees_have_no_secret(ana: RemotePython, secrets: dict[str, bytes]) -> None:
    *leaks, (_, processes) = ana.call(on_a_host, search_processes, hidden(secrets), seconds=200.0)
    assert leaks == []
    assert int(processes) >= 1


def test_files_that_users_python_sees_have_no_secret(
    ana: RemotePython, secrets: dict[str, bytes], directory: Path, cluster: StandingCluster
) -> None:
    programs = [sys.prefix, sys.base_prefix, "/usr", "/proc", "/sys"]
    places = [*map(str, (directory, cluster.directory)), "/"]
    *leaks, (_, files) = ana.call(on_a_host, search_files, hidden(secrets), places, programs, 20_000, seconds=200.0)
    assert leaks == []
    assert int(files) >= 1


def test_the_search_finds_what_is_there(ana: RemotePython) -> None:
    """Check that the search would find a secret, with values that are not secret."""
    known = {"a variable": b"JAX_PLATFORMS=cpu", "an argument": b"atoll.host_services.python.program.python_main"}
    *leaks, _ = ana.call(on_a_host, search_processes, hidden(known), seconds=200.0)
    assert {name for _, name in leaks} == set(known)


def test_the_journal_has_no_secret_in_the_clear(
    ana: RemotePython, cluster: StandingCluster, secrets: dict[str, bytes], directory: Path
) -> None:
    files = [path for path in (directory / "journal").iterdir() if path.is_file()]
    assert len(files) >= 2
    assert {path.name: within(path.read_bytes(), secrets) for path in files} == {path.name: [] for path in files}


def test_arguments_of_the_clusters_processes_and_its_log_have_no_secret(
    cluster: StandingCluster, ana: RemotePython, secrets: dict[str, bytes]
) -> None:
    processes = [*cluster.processes().values(), psutil.Process(ana.pid)]
    processes += [child for each in processes for child in each.children(recursive=True)]
    texts = {f"{each.pid}: {each.cmdline()[3:4]}": "\0".join(each.cmdline()).encode() for each in processes}
    texts["log"] = cluster.messages().encode()
    assert {place: within(text, secrets) for place, text in texts.items()} == {place: [] for place in texts}


def test_a_dump_has_no_secret(cluster: StandingCluster, ana: RemotePython, secrets: dict[str, bytes]) -> None:
    join = read_join(str(join_file(cluster.directory)))
    dump = request_dump(join.address, "", join)
    events = b"".join(repr(event).encode() for event, _ in replay(dump.splitlines()))
    assert (within(dump, secrets), within(events, secrets)) == ([], [])


def test_a_dump_of_the_journal_has_no_secret(
    cluster: StandingCluster, secrets: dict[str, bytes], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_KEY_FILE", str(directory / "state" / "key"))
    rows = [json.loads(line) for line in dump_of_journal(directory / "journal")]
    content = b"".join(base64.b64decode(row.get("base", "") or row.get("encoded", "")) for row in rows)
    digests = {f"digest of {name}": token_hash(token).encode() for name, token in TOKENS.items()}
    assert within(content + json.dumps(rows[0]).encode(), secrets | digests) == []
