"""Tests of tenants' views: a page, a scrape and `atoll top` show what their token may see."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster_process import User, first_line
from tests.web.browser import Page, browser, needs_browser
from tests.web.cluster import serving
from tests.web.test_web_metrics import get

RED, BLUE, BOSS = ("r" * 32, "b" * 32, "o" * 32)
_FILE = f"""
[tenant.red]
token = "{RED}"
share = 3

[tenant.blue]
token = "{BLUE}"

[tenant.boss]
token = "{BOSS}"
role = "operator"
"""
# A session that computes without end, so that it has work whenever it is asked for.
_WORKS = """
    import asyncio, os
    from atoll.devices.null.null_program import NullProgram
    from atoll.session.bare import BareClient, call, program, sharded

    async def main():
        client = await BareClient.open(ADDRESS, LABEL, os.environ["ATOLL_TOKEN"])
        devices = client.devices[:1]
        spec, shard = sharded(devices), ("uint8", (4,))
        made = await client.compile(NullProgram("works", 0.005, (), (shard,)), devices)
        number = client.register(program("works", (), (call(made, (), (spec,), devices),), (0,)))
        print("open", flush=True)
        under_way = []
        while True:
            under_way.append(await client.launch(number, (), 1))
            if len(under_way) == 16:
                first = under_way.pop(0)
                await client.wait(first)
                client.release(first)

    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def shared(program_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    """Return a cluster with tenants, two of which have a session that computes."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as user:
        file = Path(directory) / "tenants.toml"
        file.write_text(_FILE)
        user.env["ATOLL_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
        address = user.atoll("up", "--islands", "2x1x1", "--platform", "null", "--tenants", str(file)).check().stdout
        running = []
        for name, token in (("red", RED), ("blue", BLUE)):
            code = _WORKS.replace("ADDRESS", repr(address.strip())).replace("LABEL", repr(f"{name}.py"))
            running.append(user.start(sys.executable, "-c", textwrap.dedent(code), ATOLL_TOKEN=token))
            assert first_line(running[-1]) == "open"
        yield user
        for process in running:
            process.kill()
            process.communicate()
        user.atoll("down", ATOLL_TOKEN=BOSS).check()
        file.unlink()
        assert user.leftovers() == []


def test_a_scrape_with_a_users_token_has_its_own_alone(shared: User):
    with serving(shared, "metrics", ATOLL_TOKEN=BLUE) as url:
        _, _, text = get(url)
    assert 'atoll_sessions{tenant="blue"} 1.0' in text
    assert "red" not in text


def test_a_scrape_with_an_operators_token_has_everybodys(shared: User):
    with serving(shared, "metrics", ATOLL_TOKEN=BOSS) as url:
        _, _, text = get(url)
    assert 'atoll_tenant_share{tenant="red"} 3.0' in text
    assert 'atoll_sessions{tenant="blue"} 1.0' in text


def test_top_with_a_users_token_shows_its_own_alone(shared: User):
    shown = shared.atoll("top", ATOLL_TOKEN=RED).check().stdout
    assert "red.py" in shown
    assert "blue" not in shown


@needs_browser
def test_a_page_with_a_users_token_shows_no_log(shared: User):
    async def use(url: str) -> None:
        async with looking(url) as page:
            await page.open(url.partition("/?")[0] + "/log")
            await page.until("document.querySelector('[data-line=log]')?.innerText.includes('only operators')")
            assert await page.value("document.querySelector('[data-table=Log]').offsetParent") is None
            assert await page.rows("Log") == []

    with serving(shared, "web", ATOLL_TOKEN=RED) as url:
        asyncio.run(use(url))


@asynccontextmanager
async def looking(url: str) -> AsyncIterator[Page]:
    """Yield a browser that shows the complete page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        async with browser(Path(directory)) as page:
            await page.open(url)
            await page.until("document.querySelectorAll('[data-table=Devices] tbody tr').length === 2")
            yield page


async def until_got(page: Page, is_so: Callable[[dict[str, int]], bool]) -> None:
    """Wait until tenants get these percentages. Fail the test if that takes long."""
    got: dict[str, int] = {}
    try:
        async with asyncio.timeout(60):
            while not got or not is_so(got):
                await asyncio.sleep(0.1)
                got = {row["tenant"]: int(row["share got"].split()[0]) for row in await page.rows("Tenants")}
    except TimeoutError:
        pytest.fail(f"what tenants got was {got} in the end")


@pytest.mark.slow
@needs_browser
def test_a_page_with_a_users_token_shows_its_own_alone_and_offers_nothing_else(shared: User):
    async def look(url: str) -> tuple[list[str], list[str], int, str]:
        async with looking(url) as page:
            tenants = [row["tenant"] for row in await page.rows("Tenants")]
            buttons = int(await page.value("document.querySelectorAll('[data-table] tbody button').length"))
            text = str(await page.value("document.body.innerText"))
            await page.open(url.partition("/?")[0] + "/sessions")
            await page.until("document.querySelector('[data-table=Sessions] tbody button')")
            return tenants, [row["program"] for row in await page.rows("Sessions")], buttons, text

    with serving(shared, "web", ATOLL_TOKEN=BLUE) as url:
        tenants, programs, buttons, text = asyncio.run(look(url))
    assert (tenants, programs, buttons) == (["blue"], ["blue.py"], 0)
    assert "Change" not in text
    assert "Add an island" not in text
    with serving(shared, "web", ATOLL_TOKEN=BOSS) as url:
        tenants, programs, buttons, text = asyncio.run(look(url))
    assert (sorted(tenants), sorted(programs)) == (["blue", "boss", "default", "red"], ["blue.py", "red.py"])
    assert buttons == 2 + 4, "to drain each island, and to change each tenant"


@pytest.mark.slow
@needs_browser
def test_an_operator_sets_a_share_and_the_page_shows_what_was_set_and_what_is_got(shared: User):
    async def use(url: str) -> None:
        async with looking(url) as page:

            async def share_set(tenant: str) -> str:
                return next(row["share set"] for row in await page.rows("Tenants") if row["tenant"] == tenant)

            assert (await share_set("red"), await share_set("blue")) == ("3", "1")
            await until_got(page, lambda got: 65 <= got["red"] <= 85 and got["boss"] == 0)
            await page.click("Change", "[data-table=Tenants]", row="red")
            await page.fill(".q-dialog input", "1")
            await page.click("Cancel", ".q-dialog")
            await page.until("!document.querySelector('.q-dialog button')")
            assert share_of(shared, "red") == 3.0, "it was not confirmed"
            await page.click("Change", "[data-table=Tenants]", row="red")
            await page.until("/is 3/.test(document.querySelector('.q-dialog')?.innerText)")
            await page.fill(".q-dialog input", "1")
            await page.click("Set", ".q-dialog")
            await until_got(page, lambda got: 40 <= got["red"] <= 60)
            assert (await share_set("red"), share_of(shared, "red")) == ("1", 1.0)
            await page.click("Change", "[data-table=Tenants]", row="blue")
            await page.fill(".q-dialog input", "-1")
            await page.click("Set", ".q-dialog")
            await page.until(
                "[...document.querySelectorAll('.q-notification')].some(e => /share/.test(e.innerText) && "
                "e.classList.contains('bg-negative'))"
            )
            assert share_of(shared, "blue") == 1.0

    with serving(shared, "web", ATOLL_TOKEN=BOSS) as url:
        asyncio.run(use(url))


@pytest.mark.slow
@needs_browser
def test_a_limit_is_set_and_shown_with_what_the_tenant_has_of_it(shared: User):
    async def use(url: str) -> None:
        async with looking(url) as page:
            await page.click("Change", "[data-table=Tenants]", row="boss")
            await page.fill(".q-dialog input[aria-label^=memory]", "8 elephants")
            await page.click("Set", ".q-dialog")
            await page.until("/is not an amount of memory/.test(document.querySelector('.q-dialog').innerText)")
            await page.fill(".q-dialog input[aria-label^=memory]", "8GiB")
            await page.click("Set", ".q-dialog")
            tenants = "document.querySelector('[data-table=Tenants]').innerText"
            await page.until(f"/0 B of 8.0 GiB per device/.test({tenants})")

    with serving(shared, "web", ATOLL_TOKEN=BOSS) as url:
        asyncio.run(use(url))


@pytest.mark.slow
@needs_browser
def test_usage_is_that_of_all_tenants_for_an_operator_and_its_own_for_a_user(shared: User):
    async def look(url: str, by: str) -> tuple[list[dict[str, str]], str]:
        async with looking(url) as page:
            await page.open(url.partition("/?")[0] + "/usage")
            await page.until("document.querySelector('[data-table=\"Usage by tenant\"] tbody tr td:nth-child(2)')")
            if by != "tenant":
                await page.click(by, "[data-by]")
            await page.until(f"document.querySelector('[data-table=\"Usage by {by}\"] tbody tr td:nth-child(2)')")
            return await page.rows(f"Usage by {by}"), str(await page.value("document.body.innerText"))

    with serving(shared, "web", ATOLL_TOKEN=BOSS) as url:
        rows, text = asyncio.run(look(url, "tenant"))
    assert {row["tenant"] for row in rows} == {"red", "blue"}
    assert all(float(row["device seconds"]) > 0 for row in rows)
    assert "were idle" in text
    with serving(shared, "web", ATOLL_TOKEN=BLUE) as url:
        rows, text = asyncio.run(look(url, "session"))
    assert [(row["tenant"], row["script"]) for row in rows] == [("blue", "blue.py")]
    assert "were idle" not in text


def share_of(user: User, tenant: str) -> float:
    tenants = json.loads(user.atoll("tenants", "--json", ATOLL_TOKEN=BOSS).check().stdout)
    return next(float(each["share"]) for each in tenants if each["name"] == tenant)
