"""A snapshot as Prometheus metrics, which `prometheus_client` writes as text or OpenMetrics, as the scraper asks.

Names follow Prometheus' conventions: base units (seconds, bytes), and `_total` for counters. Counters restart at zero
with a new controller, as Prometheus expects of a restarted process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from atoll.cluster.lifecycle import IslandState
from atoll.scheduling.tallies import BOUNDS
from atoll.telemetry.snapshot import HistogramView, Snapshot


def exposition(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics of a snapshot and their content type, which is the one that the Accept header asks for."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Collector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield from metrics_of(self._snapshot)

    def describe(self) -> Iterable[Metric]:
        return ()


def metrics_of(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield all metrics. Islands, devices and hosts are labeled by their numbers in `atoll status`."""
    yield InfoMetricFamily(
        "atoll_cluster", "The cluster.", value={"version": snapshot.version, "topology": snapshot.topology}
    )
    yield from _islands(snapshot)
    yield from _devices(snapshot)
    yield from _tenants(snapshot)
    yield from _gangs(snapshot)
    yield from _events(snapshot)
    yield from _controller(snapshot)


def _gauge(name: str, text: str, labels: tuple[str, ...] = (), rows: Iterable[tuple[object, ...]] = ()) -> Metric:
    """Return a gauge. Each row has the labels, followed by the value."""
    family = GaugeMetricFamily(f"atoll_{name}", text, labels=labels)
    for *given, value in rows:
        family.add_metric([str(each) for each in given], float(value))  # type: ignore[arg-type]
    return family


def _counter(name: str, text: str, labels: tuple[str, ...] = (), rows: Iterable[tuple[object, ...]] = ()) -> Metric:
    family = CounterMetricFamily(f"atoll_{name}", text, labels=labels)
    for *given, value in rows:
        family.add_metric([str(each) for each in given], float(value))  # type: ignore[arg-type]
    return family


def _islands(snapshot: Snapshot) -> Iterator[Metric]:
    islands = snapshot.islands
    yield _gauge(
        "island_state",
        "1 for the current state of an island, 0 for the others.",
        ("island", "state"),
        ((each.id, state.value, each.state == state) for each in islands for state in IslandState),
    )
    yield _gauge(
        "island_window_gangs",
        "Gangs that may be in flight on each host of an island.",
        ("island",),
        ((each.id, each.window) for each in islands),
    )
    yield _gauge(
        "island_in_flight_gangs",
        "Gangs in flight on an island, as counted against its window.",
        ("island",),
        ((each.id, each.in_flight) for each in islands),
    )
    yield _gauge(
        "island_expected_busy_seconds",
        "Expected duration of the gangs in flight on an island.",
        ("island",),
        ((each.id, each.busy_ms / 1e3) for each in islands),
    )
    yield _gauge(
        "hosts",
        "Hosts that have joined, by state.",
        ("island", "state"),
        (
            (each.id, state, sum(host.state == state for host in each.hosts))
            for each in islands
            for state in ("ready", "failed")
        ),
    )


def _devices(snapshot: Snapshot) -> Iterator[Metric]:
    labels = ("island", "host", "device", "kind")
    devices = [
        ((island.id, host.id, device.id, device.kind), device)
        for island in snapshot.islands
        for host in island.hosts
        for device in host.devices
    ]
    yield _gauge(
        "device_memory_used_bytes",
        "Reserved memory of a device.",
        labels,
        ((*names, device.used_bytes) for names, device in devices),
    )
    yield _gauge(
        "device_memory_peak_bytes",
        "Largest reserved memory of a device so far.",
        labels,
        ((*names, device.peak_bytes) for names, device in devices),
    )
    yield _gauge(
        "device_memory_limit_bytes",
        "Memory of a device, if known.",
        labels,
        ((*names, device.memory_bytes) for names, device in devices if device.memory_bytes),
    )


def _tenants(snapshot: Snapshot) -> Iterator[Metric]:
    tenants = snapshot.tenants
    yield _gauge(
        "tenant_share", "Share that was set for a tenant.", ("tenant",), ((each.name, each.share) for each in tenants)
    )
    sessions = ((each.name, each.open_sessions) for each in tenants)
    yield _gauge("sessions", "Open sessions.", ("tenant",), sessions)
    yield _gauge(
        "tenant_memory_bytes",
        "Size of the arrays of a tenant's sessions, on all devices.",
        ("tenant",),
        ((each.name, each.bytes) for each in tenants),
    )
    yield _counter(
        "tenant_device_seconds",
        "Device time that a tenant used.",
        ("tenant",),
        ((each.name, each.device_seconds) for each in tenants),
    )
    yield _gauge(
        "launches_in_flight",
        "Launches in flight.",
        ("tenant",),
        ((each.name, each.in_flight) for each in tenants),
    )
    yield _gauge(
        "tenant_device_memory_bytes",
        "Memory of a device reserved for a tenant.",
        ("tenant", "device"),
        ((each.name, device, nbytes) for each in tenants for device, nbytes in each.device_bytes),
    )


def _gangs(snapshot: Snapshot) -> Iterator[Metric]:
    gangs = snapshot.gangs
    labels: tuple[str, ...] = ("island", "tenant")
    yield _gauge(
        "gangs_waiting",
        "Gangs waiting for an island.",
        labels,
        ((each.island, each.tenant, each.waiting) for each in gangs),
    )
    yield _gauge(
        "gangs_running", "Gangs in flight.", labels, ((each.island, each.tenant, each.running) for each in gangs)
    )
    yield _counter(
        "gangs_failed", "Gangs that failed.", labels, ((each.island, each.tenant, each.failed) for each in gangs)
    )
    waiting = HistogramMetricFamily(
        "atoll_gang_waiting_seconds", "Time from launch to dispatch of the dispatched gangs.", labels=labels
    )
    running = HistogramMetricFamily(
        "atoll_gang_running_seconds", "Duration of a gang on the slowest of its hosts.", labels=labels
    )
    for each in gangs:
        names = [str(each.island), each.tenant]
        _observe(waiting, names, each.waited)
        _observe(running, names, each.ran)
    yield from (waiting, running)
    moved = [((each.island, each.tenant, kind.kind), kind) for each in gangs for kind in each.transfers]
    labels = (*labels, "kind")
    yield _counter("transfers", "Completed transfers.", labels, ((*names, kind.count) for names, kind in moved))
    yield _counter(
        "transfer_bytes", "Bytes moved by completed transfers.", labels, ((*names, kind.bytes) for names, kind in moved)
    )


def _events(snapshot: Snapshot) -> Iterator[Metric]:
    counts = snapshot.event_counts
    losses = {each.island: each.count for each in counts if each.kind == "failed"}
    backs = {each.island: each.count for each in counts if each.kind == "back"}
    islands = [each.id for each in snapshot.islands]
    yield _counter(
        "island_failures", "Failures of an island.", ("island",), ((each, losses.get(each, 0)) for each in islands)
    )
    yield _counter(
        "island_restarts",
        "Restarts of an island after a failure.",
        ("island",),
        ((each, backs.get(each, 0)) for each in islands),
    )
    sums: dict[str, int] = {}
    for count in counts:
        sums[count.kind] = sums.get(count.kind, 0) + count.count
    yield _counter("events", "Events per kind.", ("kind",), sums.items())


def _controller(snapshot: Snapshot) -> Iterator[Metric]:
    load, functions = snapshot.load, snapshot.functions
    yield _counter("controller_cpu_seconds", "CPU time of the controller.", rows=[(load.cpu_seconds,)])
    lag = HistogramMetricFamily(
        "atoll_controller_loop_lag_seconds", "Largest delay of the controller's event loop in each second."
    )
    _observe(lag, [], load.lags)
    yield lag
    yield _gauge("controller_connections", "Connections to the controller.", rows=[(load.connections,)])
    yield _gauge("controller_unsent_bytes", "Bytes that peers have not read yet.", rows=[(load.unsent_bytes,)])
    yield _counter(
        "controller_messages",
        "Messages that the controller received or sent.",
        ("direction",),
        [("in", load.messages_in), ("out", load.messages_out)],
    )
    yield _counter(
        "controller_message_bytes",
        "Bytes of these messages.",
        ("direction",),
        [("in", load.bytes_in), ("out", load.bytes_out)],
    )
    yield _counter(
        "functions_compiled",
        "Functions that workers compiled or found in their cache.",
        ("cached",),
        [("false", functions.compiled), ("true", functions.cached)],
    )
    yield _counter("compile_seconds", "Time that compilation took.", rows=[(functions.seconds,)])


def _observe(family: HistogramMetricFamily, labels: list[str], view: HistogramView) -> None:
    counts = view.counts or (0,) * (len(BOUNDS) + 1)
    buckets, total = [], 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    family.add_metric(labels, buckets, view.seconds)
