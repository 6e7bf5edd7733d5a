"""Tests of the page in a real browser: it loads without a network, shows what `atoll status` shows, and runs
actions.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from atoll.quantities import human_bytes
from tests.cluster_process import User, eventually, first_line
from tests.web.browser import Page, browser, needs_browser
from tests.web.cluster import serving

pytestmark = [pytest.mark.slow, needs_browser]
# A session that holds memory, and stays until it is ended.
HOLDS = """
    import asyncio, sys
    from atoll.devices.null.null_program import NullProgram
    from atoll.session.bare import BareClient, call, program, sharded

    async def main():
        client = await BareClient.open(sys.argv[1] if len(sys.argv) > 1 else ADDRESS, "holds.py")
        devices = client.devices[:2]
        spec, shard = sharded(devices, 1 << 20), ("uint8", (1 << 20,))
        made = await client.compile(NullProgram("zeros", 0.0, (), (shard,)), devices)
        number = client.register(program("zeros", (), (call(made, (), (spec,), devices),), (0,)))
        await client.wait(await client.launch(number, (), 1))
        print("holds", flush=True)
        await asyncio.sleep(300)

    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def up(program_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[User, str]]:
    """Return a user whose cluster of null devices is up, and its address."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as user:
        user.env["ATOLL_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
        address = user.atoll("up", "--islands", "2x1x2", "--platform", "null").check().stdout.strip()
        yield user, address
        user.atoll("down").check()
        assert user.leftovers() == []


@pytest.fixture(scope="module")
def url(up: tuple[User, str]) -> Iterator[str]:
    with serving(up[0], "web") as found:
        yield found


def visit(url: str, use: Callable[[Page, str], Awaitable[None]]) -> Page:
    """Open the page in a browser. Fail the test for errors in the console and for requests to other servers."""
    pages = []

    async def run() -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            async with browser(Path(directory)) as page:
                pages.append(page)
                await page.open(url)
                await page.until("document.querySelector('[data-line=headline]')?.innerText.includes('devices')")
                await use(page, url.partition("/?")[0])

    asyncio.run(run())
    (page,) = pages
    hosts = {urlsplit(each).hostname for each in page.asked if each.startswith(("http", "ws"))}
    assert hosts == {"127.0.0.1"}, "it must work where there is no network"
    assert page.output == []
    return page


def status(user: User) -> Any:
    return json.loads(user.atoll("status", "--json").check().stdout)


def holder(user: User, address: str) -> Any:
    code = HOLDS.replace("ADDRESS", repr(address))
    import textwrap

    process = user.start(sys.executable, "-c", textwrap.dedent(code))
    assert first_line(process) == "holds"
    return process


def test_all_pages_load_and_ask_nobody_else(up: tuple[User, str], url: str):
    async def use(page: Page, base: str) -> None:
        for path, what in (
            ("/", "[data-table=Devices] tbody tr"),
            ("/sessions", "[data-table=Sessions] thead"),
            ("/usage", '[data-table="Usage by tenant"] thead'),
            ("/timeline", "svg.time-line"),
            ("/events", "[data-table=Events] tbody tr"),
            ("/log", "[data-table=Log] tbody tr"),
        ):
            await page.open(base + path)
            await page.until(f"document.querySelector({json.dumps(what)})")

    visit(url, use)


def test_the_time_line_is_paused_and_zoomed(up: tuple[User, str], url: str):
    async def use(page: Page, base: str) -> None:
        await page.open(base + "/timeline")
        await page.until("document.querySelector('svg.time-line')?.textContent.includes('10 s ago')")
        await page.value("document.querySelector('[data-pause]').click()")
        await page.value("document.querySelector('[data-zoom]').click()")
        option = "[...document.querySelectorAll('.q-menu .q-item')].find(each => each.innerText.trim() === '1 s')"
        await page.until(option)
        await page.value(f"{option}.click()")
        await page.until("document.querySelector('svg.time-line').textContent.includes('0.2 s ago')")

    visit(url, use)


def test_a_phone_scrolls_tables_and_not_the_page(up: tuple[User, str], url: str):
    async def use(page: Page, base: str) -> None:
        await page.resize(390, 844)
        for path in ("/", "/sessions", "/usage", "/timeline", "/events", "/log"):
            await page.open(base + path)
            await page.until("document.querySelector('.q-table thead tr, svg.time-line')")
            await page.until("document.documentElement.scrollWidth <= 390")
        await page.open(base)
        await page.until("document.querySelectorAll('[data-tile]').length === 3")
        inside, table = "[data-table=Islands] .q-table__middle", "[data-table=Islands] tbody button"
        await page.until(f"(e => e.scrollWidth > e.clientWidth)(document.querySelector('{inside}'))")
        assert await page.value(f"document.querySelector('{table}').getBoundingClientRect().right <= 390")
        assert await page.value(f"document.querySelector('{table}').getBoundingClientRect().height < 40")

    visit(url, use)


def test_a_filter_leaves_the_events_that_contain_its_text(up: tuple[User, str], url: str):
    async def use(page: Page, base: str) -> None:
        await page.open(base + "/events")
        await page.until("document.querySelectorAll('[data-table=Events] tbody tr').length >= 2")
        await page.fill("input[data-filter]", "Island 1")
        await page.until("document.querySelectorAll('[data-table=Events] tbody tr').length === 1")
        assert [row["where"] for row in await page.rows("Events")] == ["island 1"]

    visit(url, use)


def test_the_log_is_filtered_and_hostile_names_in_it_are_text(up: tuple[User, str], url: str):
    evil = "<img src=x onerror=document.title='evil'> {{ 7 * 7 }}"
    (log,) = Path(up[0].env["ATOLL_STATE_DIR"]).rglob("log")
    with open(log, "a") as file:
        file.write(f"2026-11-26 20:05:55,123 atoll controller[17] WARNING atoll.state: session 4711 {evil} opened\n")

    async def use(page: Page, base: str) -> None:
        await page.open(base + "/log")
        await page.until("document.querySelectorAll('[data-table=Log] tbody tr').length >= 3")
        await page.fill("input[data-session]", "4711")
        await page.until("document.querySelectorAll('[data-table=Log] tbody tr').length === 1")
        (row,) = await page.rows("Log")
        assert (row["process"], row["level"]) == ("controller", "warning")
        assert row["message"] == f"atoll.state: session 4711 {evil} opened"
        assert await page.value("document.querySelector('[data-table=Log] tbody img')") is None
        assert "evil" not in await page.value("document.title")
        await page.fill("input[data-filter]", "nowhere")
        await page.until("document.querySelector('[data-line=log]').innerText.startsWith('0 of the last')")

    visit(url, use)


def test_numbers_are_those_of_atoll_status(up: tuple[User, str], url: str):
    user, address = up
    process = holder(user, address)
    try:

        async def use(page: Page, base: str) -> None:
            await page.until("document.querySelectorAll('[data-table=Devices] tbody tr').length === 4")
            report = status(user)
            devices = [device for island in report["islands"] for host in island["hosts"] for device in host["devices"]]
            assert [(row["device"], row["memory"]) for row in await page.rows("Devices")] == [
                (str(each["id"]), f"{human_bytes(each['used_bytes'])} of {human_bytes(each['memory_bytes'])}")
                for each in devices
            ]
            assert {each["used_bytes"] for each in devices} == {0, 1 << 20}
            assert [(row["island"], row["state"], row["gangs started"]) for row in await page.rows("Islands")] == [
                (str(each["id"]), each["state"], str(each["started"])) for each in report["islands"]
            ]
            await page.open(base + "/sessions")
            await page.until("document.querySelector('[data-table=Sessions] tbody button')")
            (session,) = report["sessions"]
            (row,) = await page.rows("Sessions")
            assert (row["session"], row["program"], row["pid"]) == (
                str(session["id"]),
                session["label"],
                str(session["pid"]),
            )
            assert (row["arrays"], row["memory"], row["launches"]) == ("1", "2.0 MiB", str(session["launches"]))

        visit(url, use)
    finally:
        process.kill()
        process.communicate()
    assert eventually(lambda: status(user)["sessions"] == [])


def test_a_session_is_ended_by_who_says_it_twice(up: tuple[User, str], url: str):
    user, address = up
    process = holder(user, address)
    try:

        async def use(page: Page, base: str) -> None:
            await page.open(base + "/sessions")
            await page.click("End", "[data-table=Sessions]")
            await page.click("Cancel", ".q-dialog")
            await page.until("!document.querySelector('.q-dialog button')")
            assert len(status(user)["sessions"]) == 1, "it was not confirmed"
            await page.click("End", "[data-table=Sessions]")
            await page.click("End the session", ".q-dialog")
            await page.until(
                "[...document.querySelectorAll('.q-notification')].some(e => /has ended/.test(e.innerText))"
            )
            await page.until("!document.querySelector('[data-table=Sessions] tbody button')")

        visit(url, use)
        assert status(user)["sessions"] == []
        events = [event["kind"] for event in status(user)["events"]]
        assert events[-2:] == ["session ended", "operation"]
    finally:
        process.kill()
        process.communicate()


def test_a_session_is_suspended_and_resumed(up: tuple[User, str], url: str):
    user, address = up
    process = holder(user, address)
    try:

        async def use(page: Page, base: str) -> None:
            await page.open(base + "/sessions")
            await page.click("Suspend", "[data-table=Sessions]")
            await page.click("To memory", ".q-dialog")
            await page.click("Resume", "[data-table=Sessions]")
            assert status(user)["sessions"][0]["state"] == "suspended in memory"
            await page.click("Resume", ".q-dialog")
            await page.click("Suspend", "[data-table=Sessions]")
            await page.click("Cancel", ".q-dialog")
            assert not status(user)["sessions"][0]["state"]

        visit(url, use)
    finally:
        process.kill()
        process.communicate()
    assert eventually(lambda: status(user)["sessions"] == [])


def test_a_slice_is_moved_by_who_says_where(up: tuple[User, str], url: str):
    user, address = up
    process = user.start(
        sys.executable,
        "-c",
        "import atoll, time\n"
        "atoll.make_virtual_device_set().add_slice(devices=1)\n"
        "print('holds', flush=True)\n"
        "time.sleep(300)",
        ATOLL_ADDRESS=address,
        JAX_PLATFORMS="atoll",
    )
    try:
        assert first_line(process) == "holds"
        (before,) = status(user)["sessions"][0]["slices"]

        async def use(page: Page, base: str) -> None:
            await page.open(base + "/sessions")
            await page.click("Move", "[data-table=Slices]")
            await page.fill(".q-dialog input", "nowhere")
            await page.click("Move the slice", ".q-dialog")
            await page.until("document.querySelector('.q-dialog .problem').innerText.includes('invalid target')")
            await page.fill(".q-dialog input", str(1 - before["island"]))
            await page.click("Move the slice", ".q-dialog")
            await page.until("[...document.querySelectorAll('.q-notification')].some(e => /slice/.test(e.innerText))")
            await page.until(
                f"[...document.querySelectorAll('[data-table=Slices] tbody td')].some(e => e.innerText === "
                f"'{1 - before['island']}')"
            )

        visit(url, use)
        (after,) = status(user)["sessions"][0]["slices"]
        assert after["island"] == 1 - before["island"]
        assert status(user)["events"][-1]["kind"] == "operation"
    finally:
        process.kill()
        process.communicate()
    assert eventually(lambda: status(user)["sessions"] == [])


def test_an_island_is_drained_and_another_added(up: tuple[User, str], url: str):
    user, _ = up

    async def use(page: Page, base: str) -> None:
        await page.click("Drain", "[data-table=Islands]")
        await page.click("Drain", ".q-dialog")
        await page.until("/drained/.test(document.querySelector('[data-table=Islands]').innerText)")
        assert [each["state"] for each in status(user)["islands"]] == ["drained", "ready"]
        await page.click("Add an island")
        await page.click("Add", ".q-dialog")
        await page.until("document.querySelectorAll('[data-table=Islands] tbody tr').length === 3")
        await page.until("document.querySelectorAll('[data-table=Islands] tbody button').length === 2")

    visit(url, use)
    assert [each["state"] for each in status(user)["islands"]] == ["drained", "ready", "ready"]


def test_who_has_no_key_sees_nothing(url: str):
    with pytest.raises(HTTPError) as refused:
        urlopen(url.partition("?")[0], timeout=30)
    with refused.value:
        assert refused.value.code == 403


def test_the_metrics_are_there_too(url: str):
    with urlopen(url.partition("?")[0] + "metrics", timeout=30) as reply:
        assert b"atoll_island_state" in reply.read()
