"""Whose view it is: a page, a scrape and `atoll top` show what their token may see."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_process import User
from tests.web.cluster import serving
from tests.web.test_metrics import get

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
# A session that stays until it is ended.
_STAYS = """
    import asyncio, os
    from atoll.session.opening import open_session
    from atoll.wire.address import parse_address

    async def main():
        await open_session(parse_address(ADDRESS), os.environ["ATOLL_TOKEN"], LABEL, os.getpid(), 30.0)
        print("open", flush=True)
        await asyncio.sleep(300)

    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def shared(program_cache: Path) -> Iterator[User]:
    """A cluster with tenants, of which two have a session open."""
    with tempfile.TemporaryDirectory(prefix="at-") as folder:
        user = User(Path(folder), program_cache)
        file = Path(folder) / "tenants.toml"
        file.write_text(_FILE)
        address = user.atoll("up", "--islands", "2x1x1", "--platform", "null", "--tenants", str(file)).check().stdout
        running = []
        for name, token in (("red", RED), ("blue", BLUE)):
            code = _STAYS.replace("ADDRESS", repr(address.strip())).replace("LABEL", repr(f"{name}.py"))
            running.append(user.start(sys.executable, "-c", textwrap.dedent(code), ATOLL_TOKEN=token))
            assert running[-1].stdout is not None
            assert running[-1].stdout.readline() == "open\n"
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


@pytest.mark.slow
def test_a_page_with_a_users_token_shows_its_own_alone_and_offers_nothing_else(shared: User):
    pytest.importorskip("nicegui", reason="the extra web is not installed")
    pytest.importorskip("websockets", reason="the extra test is not installed")
    from tests.web.browser import CHROMIUM, browser

    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian has it)")

    async def look(url: str) -> tuple[list[str], list[str], int]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            async with browser(Path(folder)) as page:
                await page.open(url)
                await page.until("document.querySelectorAll('[data-table=Devices] tbody tr').length === 2")
                tenants = [row["tenant"] for row in await page.rows("Tenants")]
                buttons = int(await page.value("document.querySelectorAll('[data-table] tbody button').length"))
                await page.open(url.partition("/?")[0] + "/sessions")
                await page.until("document.querySelector('[data-table=Sessions] tbody button')")
                return tenants, [row["program"] for row in await page.rows("Sessions")], buttons

    with serving(shared, "web", ATOLL_TOKEN=BLUE) as url:
        assert asyncio.run(look(url)) == (["blue"], ["blue.py"], 0)
    with serving(shared, "web", ATOLL_TOKEN=BOSS) as url:
        tenants, programs, buttons = asyncio.run(look(url))
    assert (sorted(tenants), sorted(programs)) == (["blue", "boss", "default", "red"], ["blue.py", "red.py"])
    assert buttons == 2 + 4, "to drain each island, and to set each share"
