"""A snapshot as Prometheus metrics, which `prometheus_client` writes as text or OpenMetrics, as the scraper asks.

Names follow Prometheus' conventions: base units (seconds, bytes), and `_total` for counters. Counters restart at zero
with a new controller, as Prometheus expects of a restarted process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

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
from atoll.protocol.events import JournalLoad
from atoll.state.tallies import BOUNDS
from atoll.telemetry.history import KINDS
from atoll.telemetry.snapshot import HistogramView, IslandSnapshot, Snapshot, TenantSnapshot
from atoll.telemetry.tenant_limits import RATES, TEXTS


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
    text = "Version of Atoll and islands of the cluster, in the labels version and topology."
    yield InfoMetricFamily("atoll_cluster", text, value={"version": snapshot.version, "topology": snapshot.topology})
    yield from _islands(snapshot)
    yield from _devices(snapshot)
    yield from _tenants(snapshot)
    yield from _gangs(snapshot)
    yield from _events(snapshot)
    yield from _controller(snapshot)
    yield from _journal(snapshot)


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
    for name, text, value in _ISLAND_GAUGES:
        yield _gauge(name, text, ("island",), ((each.id, value(each)) for each in islands))
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


_ISLAND_GAUGES: tuple[tuple[str, str, Callable[[IslandSnapshot], float]], ...] = (
    (
        "island_waits_for_hosts",
        "1 if an island waits for hosts or for their workers, 0 otherwise and for a drained island that stays so.",
        lambda each: each.waits_for is not None,
    ),
    ("island_window_gangs", "Gangs that may be in flight on each host of an island.", lambda each: each.window),
    (
        "island_in_flight_gangs",
        "Gangs in flight on an island, as counted against its window.",
        lambda each: each.in_flight,
    ),
    (
        "island_expected_busy_seconds",
        "Expected duration of the gangs in flight on an island.",
        lambda each: each.busy_ms / 1e3,
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
    used = ((*names, device.used_bytes) for names, device in devices)
    yield _gauge("device_memory_used_bytes", "Reserved memory of a device.", labels, used)
    peak = ((*names, device.peak_bytes) for names, device in devices)
    yield _gauge("device_memory_peak_bytes", "Largest reserved memory of a device so far.", labels, peak)
    limit = ((*names, device.memory_bytes) for names, device in devices if device.memory_bytes)
    yield _gauge("device_memory_limit_bytes", "Memory of a device, if known.", labels, limit)


def _tenants(snapshot: Snapshot) -> Iterator[Metric]:
    tenants = snapshot.tenants
    for name, text, value in _TENANT_GAUGES:
        yield _gauge(name, text, ("tenant",), ((each.name, value(each)) for each in tenants))
    used = ((each.name, each.device_seconds) for each in tenants)
    yield _counter("tenant_device_seconds", "Device time that a tenant used.", ("tenant",), used)
    rejected = ((each.name, each.rejected_publications) for each in tenants)
    text = "Requests of a tenant to publish arrays that were refused."
    yield _counter("publications_rejected", text, ("tenant",), rejected)
    reserved = ((each.name, device, nbytes) for each in tenants for device, nbytes in each.device_bytes)
    quotas = ((each.name, name, limit) for each in tenants for name in _QUOTAS if (limit := getattr(each, name)))
    yield _gauge("tenant_quota", "Quota of a tenant, if there is one.", ("tenant", "quota"), quotas)
    refused = ((each.name, limit, count) for each in tenants for limit, count in _refusals(each).items())
    text = "Requests of a tenant that failed because it reached a quota, or because a device had too little memory."
    yield _counter("tenant_refusals", text, ("tenant", "quota"), refused)
    suspended = Counter(each.tenant for each in snapshot.sessions if each.state)
    rows = ((each.name, suspended[each.name]) for each in tenants)
    yield _gauge("sessions_suspended", "Sessions that are suspended, or become so.", ("tenant",), rows)
    text = "Memory of a device reserved for a tenant."
    yield _gauge("tenant_device_memory_bytes", text, ("tenant", "device"), reserved)


_TENANT_GAUGES: tuple[tuple[str, str, Callable[[TenantSnapshot], float]], ...] = (
    ("tenant_share", "Share that was set for a tenant.", lambda each: each.share),
    ("sessions", "Open sessions.", lambda each: each.open_sessions),
    ("tenant_memory_bytes", "Size of the arrays of a tenant's sessions, on all devices.", lambda each: each.bytes),
    ("launches_in_flight", "Launches in flight.", lambda each: each.in_flight),
    ("published_names", "Names under which a tenant has published arrays.", lambda each: each.names),
    ("published_versions", "Versions of published arrays of a tenant.", lambda each: each.versions),
    ("published_bytes", "Size of the published arrays of a tenant, on all devices.", lambda each: each.published_bytes),
    ("published_file_bytes", "Size of the files of a tenant's published arrays.", lambda each: each.file_bytes),
)


def _refusals(tenant: TenantSnapshot) -> dict[str, int]:
    """Return the refusals of a tenant. Its quotas have a count of 0 before, so that the first one is an increase."""
    return dict.fromkeys(("device memory", *(name for name in _COUNTED if getattr(tenant, name))), 0) | dict(
        tenant.refusals
    )


# Quotas with a count of refusals. The metric `publications_rejected` counts refused publications.
_COUNTED = ("memory", "total_memory", "devices", "sessions", "launches", "uploads", "compiles")
_QUOTAS = [name for name in (*TEXTS, *RATES) if name != "reserve"]


def _gangs(snapshot: Snapshot) -> Iterator[Metric]:
    gangs = [((each.island, each.tenant), each) for each in snapshot.gangs]
    labels: tuple[str, ...] = ("island", "tenant")
    waiting = ((*names, each.waiting) for names, each in gangs)
    yield _gauge("gangs_waiting", "Gangs waiting for an island.", labels, waiting)
    yield _gauge("gangs_running", "Gangs in flight.", labels, ((*names, each.running) for names, each in gangs))
    yield _counter("gangs_failed", "Gangs that failed.", labels, ((*names, each.failed) for names, each in gangs))
    waited = HistogramMetricFamily(
        "atoll_gang_waiting_seconds", "Time from launch to dispatch of the dispatched gangs.", labels=labels
    )
    ran = HistogramMetricFamily(
        "atoll_gang_running_seconds", "Duration of a gang on the slowest of its hosts.", labels=labels
    )
    for names, each in gangs:
        _observe(waited, [*map(str, names)], each.waited)
        _observe(ran, [*map(str, names)], each.ran)
    yield from (waited, ran)
    moved = [((*names, kind.kind), kind) for names, each in gangs for kind in each.transfers]
    labels = (*labels, "kind")
    yield _counter("transfers", "Completed transfers.", labels, ((*names, kind.count) for names, kind in moved))
    nbytes = ((*names, kind.bytes) for names, kind in moved)
    yield _counter("transfer_bytes", "Bytes moved by completed transfers.", labels, nbytes)


def _events(snapshot: Snapshot) -> Iterator[Metric]:
    counts = snapshot.event_counts
    for kind, name, text in (
        ("failed", "island_failures", "Failures of an island."),
        ("back", "island_restarts", "Restarts of an island after a failure."),
    ):
        by_island = {each.island: each.count for each in counts if each.kind == kind}
        rows = ((each.id, by_island.get(each.id, 0)) for each in snapshot.islands)
        yield _counter(name, text, ("island",), rows)
    sums = Counter(dict.fromkeys(KINDS, 0))  # Prometheus sees no increase from no sample to 1
    for count in counts:
        sums[count.kind] += count.count
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
    messages = [("in", load.messages_in), ("out", load.messages_out)]
    yield _counter("controller_messages", "Messages that the controller received or sent.", ("direction",), messages)
    nbytes = [("in", load.bytes_in), ("out", load.bytes_out)]
    text = "Bytes of the messages that the controller received or sent."
    yield _counter("controller_message_bytes", text, ("direction",), nbytes)
    compiled = [("false", functions.compiled), ("true", functions.cached)]
    text = "Functions that workers compiled or found in their cache."
    yield _counter("functions_compiled", text, ("cached",), compiled)
    yield _counter("compile_seconds", "Time that compilation took.", rows=[(functions.seconds,)])


def _journal(snapshot: Snapshot) -> Iterator[Metric]:
    journal, seconds = snapshot.load.journal, snapshot.load.certificate_seconds
    rows = [] if journal is None else [journal]
    for name, text, value in _JOURNAL_GAUGES:
        yield _gauge(name, text, rows=[(value(each),) for each in rows])
    text = "1 if the controller holds its external lease, 0 if it sends nothing until it does."
    yield _gauge("leader_lease_held", text, rows=[(each.holds_lease,) for each in rows if each.lease])
    text = "Snapshots that the controller's process has written."
    yield _counter("journal_snapshots", text, rows=[(each.snapshots,) for each in rows])
    yield _gauge(
        "certificate_expiry_seconds",
        "Remaining validity of the controller's certificate, which is renewed after two thirds of it.",
        rows=[(seconds,)] if seconds >= 0 else [],
    )


_JOURNAL_GAUGES: tuple[tuple[str, str, Callable[[JournalLoad], float]], ...] = (
    (
        "journal_complete",
        "1 if another controller can continue from the journal, 0 if events are missing.",
        lambda each: each.complete,
    ),
    ("journal_snapshot_age_seconds", "Time since the last snapshot of the journal.", lambda each: each.snapshot_age),
    (
        "journal_snapshot_pause_seconds",
        "Time for which the controller stood still to begin the last snapshot of the journal.",
        lambda each: each.pause,
    ),
    ("journal_bytes", "Events in the journal since its last snapshot.", lambda each: each.bytes),
    ("standby_follows", "1 if a standby takes over when the controller ends.", lambda each: bool(each.standby)),
)


def _observe(family: HistogramMetricFamily, labels: list[str], view: HistogramView) -> None:
    counts = view.counts or (0,) * (len(BOUNDS) + 1)
    buckets, total = [], 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    family.add_metric(labels, buckets, view.seconds)
