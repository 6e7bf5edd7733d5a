"""Tests that only holders of the page's key can see the page."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import SettingsError
from atoll.web.page_key import HEALTH, KeyGuard, has_key, new_key, read_key

KEY = "the key of this test"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the page"})
    else:
        await send({"type": "websocket.accept"})


def ask(
    path: str = "/",
    query: str = "",
    kind: str = "http",
    is_secure: bool = False,
    method: str = "GET",
    **headers: str,
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": f"{kind}.connect"}

    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        **({"method": method} if kind == "http" else {}),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    guard = KeyGuard(_app, KEY, "atoll-key-1", frozenset({"/metrics"}), is_secure=is_secure)
    asyncio.run(guard(scope, receive, send))
    return sent


def test_without_the_key_nobody_sees_the_page():
    assert ask()[0]["status"] == 403
    assert ask(query="key=another")[0]["status"] == 403
    assert ask(cookie="atoll-key-1=another; x=y")[0]["status"] == 403
    assert ask(cookie="atoll-key-2=the key of this test")[0]["status"] == 403
    assert ask(cookie="\x00;;=")[0]["status"] == 403


def test_an_invalid_origin_is_that_of_another_site():
    for origin in ("http://[", "http://[x]"):
        assert ask(method="POST", origin=origin, host="x")[0]["status"] == 403
        assert ask(kind="websocket", origin=origin, host="x")[0]["type"] == "websocket.close"


def test_a_probe_needs_no_key_and_learns_only_that_the_server_answers():
    start, body = ask(HEALTH)
    assert (start["status"], body["body"]) == (200, b"ok\n")
    assert ask(HEALTH + "/")[0]["status"] == 403
    assert [each["type"] for each in ask(HEALTH, kind="websocket")] == ["websocket.close"]


def test_without_the_key_there_is_no_websocket():
    (closed,) = ask("/_nicegui_ws/socket.io/", kind="websocket")
    assert closed == {"type": "websocket.close", "code": 1008}
    (closed,) = ask("/_nicegui_ws/socket.io/", query="key=the+key+of+this+test", kind="websocket")
    assert closed == {"type": "websocket.close", "code": 1008}, "a key in a URL is for a page alone"


def test_the_key_becomes_a_cookie_that_other_sites_cannot_use():
    started, _ = ask("/sessions", query="a=b&key=the%20key%20of%20this%20test")
    headers = {name: value.decode() for name, value in started["headers"]}
    assert (started["status"], headers[b"location"]) == (303, "/sessions?a=b")
    assert headers[b"set-cookie"].startswith("atoll-key-1=")
    assert "HttpOnly" in headers[b"set-cookie"]
    assert "SameSite=Lax" in headers[b"set-cookie"]
    assert "Secure" not in headers[b"set-cookie"]


def test_with_tls_the_cookie_never_leaves_in_the_clear():
    started, _ = ask(query="key=the%20key%20of%20this%20test", is_secure=True)
    assert dict(started["headers"])[b"set-cookie"].endswith(b"; Secure")


def test_the_key_leads_to_no_other_site():
    started, _ = ask("//elsewhere.example/", query="key=the%20key%20of%20this%20test")
    assert dict(started["headers"])[b"location"] == b"/elsewhere.example/"


def test_who_has_the_cookie_or_shows_the_key_is_let_in():
    assert ask(cookie='atoll-key-1="the key of this test"')[0]["status"] == 200
    assert ask(authorization=f"Bearer {KEY}")[0]["status"] == 200
    (accepted,) = ask(kind="websocket", cookie='atoll-key-1="the key of this test"')
    assert accepted["type"] == "websocket.accept"


def test_what_is_open_is_open():
    assert ask("/metrics")[0]["status"] == 200
    assert ask("/metrics/")[0]["status"] == 403


def test_a_key_is_kept_in_a_file_for_its_owner_alone(tmp_path: Path):
    file = tmp_path / "key"
    key = read_key(file)
    assert read_key(file) == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key != new_key()


def test_a_short_key_is_refused(tmp_path: Path):
    (tmp_path / "key").write_text("abc\n")
    with pytest.raises(SettingsError, match="16 characters"):
        read_key(tmp_path / "key")


def test_a_bearer_token_is_the_key():
    assert has_key(KEY, f"bearer {KEY}")
    assert not has_key(KEY, KEY)
    assert not has_key(KEY, "")


COOKIE = f'atoll-key-1="{KEY}"'


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://localhost:9999", "null", "http://localhost:8080.evil"]
)
def test_a_page_of_another_origin_opens_no_websocket_with_the_cookie(origin):
    (closed,) = ask("/_nicegui_ws/", kind="websocket", cookie=COOKIE, host="localhost:8080", origin=origin)
    assert closed == {"type": "websocket.close", "code": 1008}


@pytest.mark.parametrize("headers", [{"origin": "http://localhost:8080"}, {}])
def test_the_own_page_and_programs_open_websockets(headers):
    (accepted,) = ask("/_nicegui_ws/", kind="websocket", cookie=COOKIE, host="localhost:8080", **headers)
    assert accepted == {"type": "websocket.accept"}


def test_a_page_behind_a_proxy_names_the_host_that_browsers_know():
    headers = {"origin": "https://atoll.example", "x-forwarded-host": "atoll.example"}
    (accepted,) = ask("/_nicegui_ws/", kind="websocket", cookie=COOKIE, host="localhost:8080", **headers)
    assert accepted == {"type": "websocket.accept"}


def test_a_form_of_another_origin_is_refused():
    origin = {"host": "localhost:8080", "origin": "http://localhost:9999"}
    assert ask(cookie=COOKIE, method="POST", **origin)[0]["status"] == 403
    assert ask(cookie=COOKIE, method="GET", **origin)[0]["status"] == 200
