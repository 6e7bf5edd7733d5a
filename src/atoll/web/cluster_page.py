"""The page Cluster: its load, islands, tenants, devices, transfers, published arrays and machines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from atoll.protocol import messages as m
from atoll.quantities import exact_bytes, human_bytes, human_seconds
from atoll.telemetry import tables as t
from atoll.telemetry.watch import Watch
from atoll.web.dialogs import confirmed, delete, operate
from atoll.web.drawing import sparkline_svg, tile_html
from atoll.web.live_table import Act, Column, LiveTable
from atoll.web.page_frame import PageFrame
from atoll.web.tenant_values import TenantValues

# The columns of the tables.
_ISLANDS = (
    Column("id", "island", right=True),
    Column("state", "state"),
    Column("hosts", "hosts"),
    Column("devices", "devices", right=True),
    Column("kind", "kind"),
    Column("memory", "memory (fullest device)", right=True, bar="full"),
    Column("running", "in flight", right=True),
    Column("waiting", "waiting", right=True),
    Column("started", "gangs started", right=True),
    Column("restarts", "restarts", right=True),
    Column("note", "note", is_text=True),
)
_TENANTS = (
    Column("name", "tenant"),
    Column("role", "role"),
    Column("priority", "priority", right=True),
    Column("share", "share set", right=True),
    Column("got_text", "share got", right=True),
    Column("sessions", "sessions", right=True),
    Column("memory", "memory", right=True, bar="full"),
    Column("limits", "limits", is_text=True),
    Column("running", "gangs in flight", right=True),
    Column("waiting", "waiting", right=True),
    Column("waited", "waited (median / 99 %)", right=True),
    Column("device_seconds", "device-seconds", right=True),
)
_DEVICES = (
    Column("id", "device", right=True),
    Column("island", "island", right=True),
    Column("host", "host"),
    Column("state", "state"),
    Column("kind", "kind"),
    Column("memory", "memory", right=True, bar="full"),
    Column("peak", "peak", right=True),
    Column("busy_text", "busy (5 s)", right=True, bar="busy"),
)
_VERSIONS = (
    Column("name", "name"),
    Column("version", "version", right=True),
    Column("state", "state"),
    Column("arrays", "arrays", right=True),
    Column("memory", "memory", right=True),
    Column("islands", "islands"),
    Column("readers", "readers", right=True),
    Column("age", "age (s)", right=True),
)
_MACHINES = (
    Column("name", "machine"),
    Column("address", "address"),
    Column("group", "group"),
    Column("state", "does"),
)
_TRANSFERS = (
    Column("kind", "kind"),
    Column("count", "transfers", right=True),
    Column("moved", "bytes", right=True),
)


@dataclass(frozen=True)
class _Machine:
    name: str
    address: str
    group: str
    state: str


class ClusterPage:
    """Shows the cluster, and lets operators drain and add islands and change tenants."""

    def __init__(self, frame: PageFrame) -> None:
        self._frame = frame

    async def build(self) -> None:
        def show() -> None:
            found = self._frame.watch.snapshot
            load.set_content(_load_html(self._frame.watch))
            islands.show(t.island_rows(found))
            tenants.show(t.tenant_rows(self._frame.watch))
            devices.show(t.device_rows(self._frame.watch, time.monotonic()))
            transfers.show(t.transfer_rows(found))
            versions.show(t.version_rows(found), also_none=False)
            machines.show(
                [_Machine(each.name, each.address, each.group, each.state) for each in found.machines], also_none=False
            )
            add.set_visibility(self._frame.is_operator)

        await self._frame.build("/", show, with_spans=True)
        # `tile_html` and `sparkline_svg` escape their texts.
        load = ui.html(sanitize=False).classes("full")
        islands = LiveTable(
            "Islands",
            _ISLANDS,
            "id",
            [Act("Drain", self._drain, lambda row: self._frame.is_operator and row.state == "ready")],
        )
        add = ui.button("Add an island", on_click=self._add_island).props('flat no-caps data-action="add-island"')
        tenants = LiveTable(
            "Tenants",
            _TENANTS,
            "name",
            [Act("Change", self._change_tenant, lambda row: self._frame.is_operator)],
        )
        devices = LiveTable("Devices", _DEVICES, "id")
        transfers = LiveTable("Transfers", _TRANSFERS, "kind")
        versions = LiveTable("Published arrays", _VERSIONS, "key")
        machines = LiveTable("Machines", _MACHINES, "name")

    async def _drain(self, row: dict[str, Any]) -> None:
        island = int(row["id"])
        question = f"Drain island {island}? Its work and arrays move to other islands, and its workers exit."
        if await confirmed(question, "Drain"):
            await operate(f"draining island {island}", self._frame.source.operate(m.DrainRequest(island)))

    async def _add_island(self) -> None:
        shapes = {str(island.shape) for island in self._frame.watch.snapshot.islands}
        like = -1 if len(shapes) == 1 else self._frame.watch.snapshot.islands[0].id
        which = "the others" if like < 0 else f"island {like}"
        if await confirmed(f"Add an island like {which}?", "Add"):
            await operate("starting an island", self._frame.source.operate(m.AddIslandRequest(like=like)))

    async def _change_tenant(self, row: dict[str, Any]) -> None:
        name = str(row["name"])
        before = TenantValues(row["share"], row["priority"], row["memory_limit"])
        with ui.dialog() as dialog, ui.card():
            ui.label(f"The share of {name} is {before.share:g}. New values apply at once to work that has not begun.")
            share = ui.number("share of device time", value=before.share, min=0, step=1)
            priority = ui.number("priority: its work goes before all work of lower ones", value=before.priority)
            memory = ui.input("memory per device, such as 8GiB; 0B for no limit", value=exact_bytes(before.memory))
            problem = ui.label().classes("problem")

            def submit() -> None:
                try:
                    dialog.submit(TenantValues.parse(share.value, priority.value, memory.value))
                except ValueError as error:
                    problem.set_text(str(error))

            with ui.row():
                ui.button("Cancel", on_click=lambda: dialog.submit(None)).props("flat no-caps")
                ui.button("Set", on_click=submit).props("no-caps color=negative")
        after = await dialog
        delete(dialog)
        if after is not None and after != before:
            await operate(f"changing {name}", self._frame.source.operate(before.change(name, after)))


def _load_html(watch: Watch) -> str:
    """Return tiles for the load of the cluster since somebody views it."""
    last, samples = watch.samples.last, list(watch.samples)
    if last is None:
        return ""
    whose = "" if watch.snapshot.viewer.role == "operator" else "own work, "
    span = f"last {human_seconds(round(watch.samples.seconds))}"
    waiting = max(sample.waiting for sample in samples)
    busy = sparkline_svg(samples, lambda sample: sample.busy, 1.0, f"busy, {whose}{span}")
    memory = sparkline_svg(samples, lambda sample: sample.memory, 1.0, f"memory, {span}")
    gangs = sparkline_svg(samples, lambda sample: sample.waiting, max(waiting, 1), f"waiting, {span}")
    limit = f" of {human_bytes(last.memory_bytes)}" if last.memory_bytes else ""
    return (
        '<div class="tiles">'
        + tile_html("busy", t.percent(last.busy), f"{whose}{span}", busy)
        + tile_html("memory", f"{human_bytes(last.used_bytes)}{limit}", span, memory)
        + tile_html("waiting gangs", str(last.waiting), f"highest {waiting}, {span}", gangs)
        + "</div>"
    )
