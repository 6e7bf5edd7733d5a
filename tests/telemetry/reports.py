"""Reports of controllers that tests play on, and snapshots of them."""

from __future__ import annotations

import msgspec

from atoll.telemetry.report import report
from atoll.telemetry.snapshot import Snapshot, read_snapshot
from tests.controller.play import Cluster


def encoded(cluster: Cluster) -> bytes:
    return msgspec.json.encode(report(cluster.controller, now=cluster.now))


def snapshot_of(cluster: Cluster) -> Snapshot:
    return read_snapshot(encoded(cluster))
