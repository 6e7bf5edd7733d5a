"""Writes src/atoll/web/dashboard.json, a dashboard for Grafana: `python scripts/grafana_dashboard.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "src" / "atoll" / "web" / "dashboard.json"

# Rows of panels: title, unit of Grafana, and queries with their legends.
Panel = tuple[str, str, list[tuple[str, str]]]
ROWS: list[tuple[str, list[Panel]]] = [
    (
        "Are users hurt?",
        [
            ("Islands by state", "short", [("sum by (state) (atoll_island_state{$cluster})", "{{state}}")]),
            (
                "Waiting time of gangs, 99 %",
                "s",
                [
                    (
                        "histogram_quantile(0.99, sum by (tenant, le) "
                        "(rate(atoll_gang_waiting_seconds_bucket{$cluster}[5m])))",
                        "{{tenant}}",
                    )
                ],
            ),
            (
                "Failures and refusals per hour",
                "short",
                [
                    ("sum(increase(atoll_island_failures_total{$cluster}[1h]))", "islands"),
                    ("sum(increase(atoll_gangs_failed_total{$cluster}[1h]))", "gangs"),
                    (
                        'sum by (kind) (increase(atoll_events_total{$cluster,kind=~"session refused|late|hangs"}[1h]))',
                        "{{kind}}",
                    ),
                ],
            ),
        ],
    ),
    (
        "Use",
        [
            (
                "Device time by tenant",
                "percentunit",
                [
                    (
                        "sum by (tenant) (rate(atoll_tenant_device_seconds_total{$cluster}[5m])) "
                        "/ scalar(count(atoll_device_memory_used_bytes{$cluster}))",
                        "{{tenant}}",
                    )
                ],
            ),
            (
                "Device memory",
                "percentunit",
                [
                    (
                        "max by (island) (atoll_device_memory_used_bytes{$cluster} "
                        "/ atoll_device_memory_limit_bytes{$cluster})",
                        "island {{island}}",
                    )
                ],
            ),
            ("Sessions", "short", [("sum by (tenant) (atoll_sessions{$cluster})", "{{tenant}}")]),
            ("Gangs waiting", "short", [("sum by (tenant) (atoll_gangs_waiting{$cluster})", "{{tenant}}")]),
            (
                "Refusals by quota per hour",
                "short",
                [
                    (
                        "sum by (tenant, quota) (increase(atoll_tenant_refusals_total{$cluster}[1h])) > 0",
                        "{{tenant}}: {{quota}}",
                    )
                ],
            ),
            (
                "Bytes moved",
                "Bps",
                [("sum by (kind) (rate(atoll_transfer_bytes_total{$cluster}[5m]))", "{{kind}}")],
            ),
            (
                "Compilation",
                "short",
                [("sum by (cached) (rate(atoll_functions_compiled_total{$cluster}[5m]))", "cached: {{cached}}")],
            ),
        ],
    ),
    (
        "Controller",
        [
            ("CPU", "percentunit", [("rate(atoll_controller_cpu_seconds_total{$cluster}[5m])", "controller")]),
            (
                "Delay of the event loop, 99 %",
                "s",
                [
                    (
                        "histogram_quantile(0.99, sum by (le) "
                        "(rate(atoll_controller_loop_lag_seconds_bucket{$cluster}[5m])))",
                        "delay",
                    )
                ],
            ),
            (
                "Messages",
                "short",
                [("sum by (direction) (rate(atoll_controller_messages_total{$cluster}[5m]))", "{{direction}}")],
            ),
            (
                "Journal and standby",
                "short",
                [("atoll_journal_complete{$cluster}", "journal"), ("atoll_standby_follows{$cluster}", "standby")],
            ),
            ("Events in the journal", "bytes", [("atoll_journal_bytes{$cluster}", "since the snapshot")]),
            ("Certificate", "s", [("atoll_certificate_expiry_seconds{$cluster}", "remaining validity")]),
        ],
    ),
]
_WIDTH, _HEIGHT, _ACROSS = 8, 8, 3


def dashboard() -> dict[str, Any]:
    """Return the model of the dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, some in ROWS:
        place = {"h": 1, "w": _WIDTH * _ACROSS, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        y += 1
        for number, (name, unit, queries) in enumerate(some):
            row, column = divmod(number, _ACROSS)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": y + row * _HEIGHT}
            panels.append(_panel(len(panels) + 1, name, unit, queries, place))
        y += _HEIGHT * -(-len(some) // _ACROSS)
    query = "label_values(atoll_cluster_info, instance)"
    source = {"type": "prometheus", "uid": "${source}"}
    cluster = {
        "name": "instance",
        "type": "query",
        "label": "Cluster",
        "query": query,
        "refresh": 2,
        "datasource": source,
    }
    return {
        "title": "Atoll",
        "uid": "atoll",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"},
                cluster,
            ]
        },
        "panels": panels,
    }


def _panel(number: int, title: str, unit: str, queries: list[tuple[str, str]], place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {
            "refId": chr(ord("A") + index),
            "expr": query.replace("$cluster", 'instance="$instance"'),
            "legendFormat": legend,
        }
        for index, (query, legend) in enumerate(queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
