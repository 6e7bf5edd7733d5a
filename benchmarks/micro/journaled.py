"""(w): what (a), (b) and (j) lose by a journal: on two clusters that differ in nothing else, in turn."""

import os
import tempfile
from collections.abc import Callable

from atoll.cluster.settings import ClusterSettings
from atoll.engines.engine_options import EngineOptions
from atoll.engines.start_engine import EngineProcess
from benchmarks.harness.backends import DEVICES
from benchmarks.harness.benchmark import Round, Settings
from benchmarks.micro.dispatch import allreduce_op_by_op, jit_op_by_op
from benchmarks.micro.programs import chained

JOURNALED = "atoll, journal"
_GRACE_SECONDS = 60.0
_ROWS: dict[str, Callable[[Settings], Round]] = {"a": jit_op_by_op, "b": allreduce_op_by_op, "j": chained}


def rows(settings: Settings) -> Round:
    """Return rounds with one operation of each kind."""
    start_cluster(has_journal=settings.system == JOURNALED)
    measures = {name: prepare(settings) for name, prepare in _ROWS.items()}
    return lambda: {name: measure()["rate"] for name, measure in measures.items()}


def start_cluster(has_journal: bool) -> None:
    """Start a cluster that ends with this process. JAX, which has not started, will use it."""
    directory = tempfile.mkdtemp(prefix="atoll-bench-")
    options = EngineOptions(
        ClusterSettings(f"1x1x{DEVICES}", grace_seconds=_GRACE_SECONDS if has_journal else 0.0),
        directory,
        parent=os.getpid(),
        journal=f"{directory}/journal" if has_journal else "",
    )
    EngineProcess(options, "the cluster to be measured").wait_until_up()
    os.environ["ATOLL_ADDRESS"] = options.controller_address
