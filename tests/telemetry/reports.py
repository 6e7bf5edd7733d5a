"""Reports of controllers in tests, and snapshots of them.

`python -m tests.telemetry.reports` rewrites the stored report.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from atoll.cluster.locations import DeviceLocation
from atoll.cluster.named_runs import NamedRun
from atoll.cluster.sandbox.mechanisms import Mechanisms, Namespaces
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.errors import OK
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.telemetry.report import report
from atoll.telemetry.snapshot import Snapshot
from tests.controller.play import BROKEN, Cluster, Play, runs

STORED = Path(__file__).with_name("report.json")


def snapshot_of(cluster: Cluster) -> Snapshot:
    return report(cluster.controller, now=cluster.now)


def eventful_snapshot() -> Snapshot:
    """Return the report of a cluster, which has a value other than the default in each field of some part."""
    settings = {
        "read": ("/data",),
        "write": ("/scratch",),
        "priority": 3,
        "reserve": 5,
        "memory": 20,
        "native_code": True,
        "publish": ("run-*",),
        "subscribe": ("bob/policy",),
    }
    limits = {
        "total_memory": 100,
        "disk": 1000,
        "devices": 4,
        "sessions": 5,
        "launches": 6,
        "uploads": 7,
        "compiles": 8,
    }
    alice = TenantSettings("alice", token_hash("alice"), 2.0, **settings, **limits)
    others = (TenantSettings(name, token_hash(name)) for name in ("bob", "carol"))
    tenants = (alice, *others)
    play = Play("2x1x2", token="cluster", tenants=tenants, device_memory=1000, mesh="2", python_read=("/all",))
    for host in play.controller.resources.hosts.values():
        host.machine = f"m{host.number}"
        host.sandbox = Mechanisms(Namespaces.BY_ROOT, True, True, missing={"landlock": "it is disabled"})
    machine = m.MachineReport("m1", "10.0.0.1", "leaving", "rack", {"cpu": 2}, 1 << 30, 1, "SIGTERM")
    connections = play.controller.connections
    assert connections.engine is not None
    connections.peers[connections.engine].address = "10.0.0.1"
    play.engine(m.EngineReport(((1, "1 more machine"),), (machine,)))
    play.with_call()
    play.array(10)
    (add_slice,) = play.send(m.AddSlice(7, SliceRequest(2)))
    assert add_slice.status == OK
    devices = play.controller.sessions[play.session].devices
    elsewhere = next(each for each in range(len(devices.virtual)) if each not in add_slice.devices)
    devices.relocate({elsewhere: DeviceLocation(0, 0, 0)})

    default, play.session = play.session, play.open(43, "notebook.py", "alice", NamedRun("notebook"), "10.0.0.1").number
    play.with_call()
    play.array(10)
    (failing,) = play.send(m.Launch(1, (10,), (11,), ()))
    play.report(0, m.Failed(failing.sequence, BROKEN))
    play.now = 1.0
    (run,) = runs(play.send(m.Launch(1, (10,), (12,), ())))
    play.report(0, m.Done(((run.sequence, 5_000_000, 205_000_000),)))
    play.now = 2.0
    bob = play.open(44, "train.py", "bob").number
    play.session, own = bob, play.session
    play.with_call()
    play.array(10)
    play.send(m.Launch(1, (10,), (11,), ()))  # runs
    play.send(m.RegisterFunction(2, "another", 902, ((0,),)))
    (compile_function,) = play.report(0, m.FeedsArrived(bob, (902,)))
    play.report(0, m.Compiled(compile_function.function, OK, b"", 0.1, True))
    play.session = own
    play.send(m.Launch(1, (10,), (13,), ()))  # waits for its tenant's memory
    play.send(m.AddSlice(8, SliceRequest(5)))  # exceeds a quota
    play.send(m.Publish(50, "run-1", 2, (12,), ("w",), on_disk=True))
    play.send(m.Publish(53, "other", 2, (12,), ("w",)))  # is refused
    play.send(m.OpenVersion(51, "run-1"))
    (version,) = play.controller.named_arrays.versions()
    version.sent, version.passed_on = 16, 24  # as if scripts on other islands had read it
    play.send(m.Publish(52, "run-1", 2, (13,), ("w",), replicas=2))  # waits for its array
    play.operator(m.SuspendRequest(default, False))
    play.proxy(default, m.Quiesced(1))
    put = next(each for each in play.outbox() if isinstance(each, m.SpillRequest))
    play.report(0, m.SpillReply(default, put.request, OK, (m.SpilledPiece(put.shards[0][0], 8),)))
    play.lose(1, "closed")
    for _ in range(3):  # these suspend the tenant
        session = play.open(45, "bad.py", "carol").number
        play.event(e.Skipped(play.now, "a bug", sessions=(session,)))
    play.session = play.open(46, "eval.py", "bob").number
    play.with_call(arguments=0)
    play.send(m.Launch(1, (), (11,), ()))  # is sent to its host, behind the gang of train.py
    play.tick(3.0)
    journal = e.JournalLoad(True, 2, 12.5, 4096, "tls://two:7000", pause=0.004)
    play.event(e.Tick(3.0, e.Load(0.004, 0.5, 3, 10, 20, 100, 200, 30, journal, 86_000.0)))
    return msgspec.structs.replace(snapshot_of(play), version="VERSION")


def readable(snapshot: Snapshot) -> str:
    """Return the JSON over lines, but lists of numbers on one line each."""
    text = msgspec.json.format(msgspec.json.encode(snapshot).decode(), indent=1) + "\n"
    return re.sub(r"\[[-\d.,\s]+\]", lambda numbers: "".join(numbers[0].split()), text)


if __name__ == "__main__":
    STORED.write_text(readable(eventful_snapshot()))
