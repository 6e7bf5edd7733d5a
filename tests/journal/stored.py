"""Write journals and persisted sessions of this version of Atoll, which later versions must read.

`python -m tests.journal.stored` adds a directory to `tests/journal/stored`, whose name is a hash of the versions of all
structs. Two changes of structs add two directories, and Git merges them without a conflict. The merged code has other
versions than each of them: a test then asks for the third directory.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import atoll
from atoll.controller.core import Controller
from atoll.controller_process.process_state import ShellDump, encode_shell, encode_snapshot
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Journal
from atoll.journal.persisted_state import PersistedCluster, PersistedState, encode_persisted
from atoll.protocol import events as e
from atoll.state.object_dumps import declared
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.retransmit_buffer import Counts
from tests.controller.control_flow_world import ChoosingWorld
from tests.controller.migrating_world import MigratingWorld
from tests.controller.test_session_persistence import persisted_of, suspended
from tests.controller.world import World
from tests.journal.worlds import act

STORED = Path(__file__).resolve().parent / "stored"
KINDS: dict[str, type[World]] = {"world": World, "migrating": MigratingWorld, "choosing": ChoosingWorld}
LINK = LinkRecord(9, "client", "the proxy", Counts(5, 1), Counts(3, 0), [b"one", b"two"], [b"three"], [(1, Counts(4))])


def shell_state() -> ShellDump:
    return ShellDump(12.5, 10, b"k" * 32, [LINK], {4: "operator"}, {2: 13.5})


def facts(controller: Controller) -> dict[str, Any]:
    """Return the facts about a controller that a test compares, as JSON."""
    sessions = {
        str(number): {
            "label": session.label,
            "arrays": {str(handle): entry.state.name for handle, entry in sorted(session.directory.entries.items())},
            "programs": sorted(session.programs),
            "functions": {str(number): name for number, name in sorted(session.functions.items())},
            "in flight": session.in_flight,
        }
        for number, session in sorted(controller.sessions.items())
    }
    return {
        "sessions": sessions,
        "gangs": sorted(controller.launches.in_flight),
        "memory": controller.ledger.total,
        "islands": {str(number): island.state for number, island in controller.resources.islands.items()},
        "connections": sorted(controller.connections.peers),
    }


def write_journal(directory: Path, kind: type[World]) -> dict[str, Any]:
    """Write a snapshot of a working world, and a segment with some later turns. Return the facts about the snapshot."""
    world = kind(random.Random(7), "2x1x2", 0.1, device_memory=100)
    del world.controller.launches.reservations.waits.hopeless
    for _ in range(2):
        world.open()
    for _ in range(14):
        act(world)
    found = facts(world.controller)
    opened = JournalDirectory(directory)
    payload = encode_snapshot(world.controller, shell_state())
    journal = Journal(opened, 3, 1, lambda: payload)
    opened.write_snapshot(1, 3, payload)
    journal.open_segment()
    handle = world.controller.handle

    def recorded(event: e.AnyEvent) -> Any:
        actions = handle(event)
        if type(event) is e.Flush:
            journal.append(list(world.controller.log.turn))
        return actions

    world.controller.handle = recorded  # type: ignore[method-assign]
    for _ in range(10):
        act(world)
    journal.close()
    return found


def write_persisted(directory: Path) -> dict[str, Any]:
    play = suspended()
    (persisted,), _ = persisted_of(play)
    cluster = PersistedCluster(play.controller.resources.topology.shapes, dict.fromkeys(persisted.sessions, "default"))
    state = PersistedState(cluster, encode_shell(shell_state()), persisted.content, persisted.secrets)
    opened = JournalDirectory(directory)
    opened.write_persisted("suspended", 3, encode_persisted(state))
    opened.close()
    return {"sessions": list(persisted.sessions), "arrays": [5]}


def write(directory: Path) -> None:
    directory.mkdir(parents=True)
    os.environ["ATOLL_KEY_FILE"] = str(directory / "key")
    found = {name: write_journal(directory / name, kind) for name, kind in KINDS.items()}
    found["persisted"] = write_persisted(directory / "persisted")
    for lock in directory.glob("*/lock"):
        lock.unlink()
    (directory / "facts.json").write_text(json.dumps(found, indent=1) + "\n")


def copied(stored: Path, to: Path) -> Path:
    """Return a copy with the file modes of a journal, which the repository does not keep."""
    shutil.copytree(stored, to)
    for path in to.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return to


@functools.cache
def current() -> Path:
    """Return the directory of this version's structs, which may not exist yet."""
    root = Path(atoll.__file__).parent
    for path in root.rglob("*.py"):  # policies are imported at their first use
        if "@dump_of(" in path.read_text():
            importlib.import_module(".".join(("atoll", *path.relative_to(root).with_suffix("").parts)))
    versions = [
        [each.tag, each.version, each.oldest]
        for each in declared()
        if each.kind.__module__.startswith("atoll.")  # other tests declare their own structs
    ]
    return STORED / hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:12]


def main() -> None:
    directory = current()
    if directory.exists():
        print(f"{directory} has the structs of this version already")
    else:
        write(directory)
        print(f"wrote {directory}: commit it")


if __name__ == "__main__":
    main()
