"""The key of the page: only browsers that have it, from the URL that `atoll web` prints, can view the page.

The first request turns the key into a cookie, so that no later URL contains it. Pages of other sites cannot use the
cookie (SameSite). Pages at other ports of the same host cannot either, because their requests name another origin.
Other users of the machine cannot connect without the key. With TLS the browser sends the cookie only encrypted
(Secure). Metrics are public on loopback, as scrapers expect; on other addresses they require the key as a bearer token.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from atoll.atomic_files import write_atomically
from atoll.errors import SettingsError

METRICS = "/metrics"
# Answered without a key and without the application, for probes of the process.
HEALTH = "/healthz"
_PARAMETER = "key"
_NEEDS_KEY = b"the key is missing or wrong: open the URL that `atoll web` has printed\n"
_ANOTHER_SITE = b"the request comes from another site's page\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def new_key() -> str:
    return secrets.token_urlsafe(24)


def read_key(file: Path) -> str:
    """Return the key in this file. If the file is missing, create it with a new key, readable by its owner only."""
    try:
        if not file.exists():
            with contextlib.suppress(FileExistsError):  # another process created it at the same time
                write_atomically(file, f"{new_key()}\n".encode(), replace=False)
        key = file.read_text().strip()
    except OSError as error:
        raise SettingsError(f"cannot read or create {file}: {error.strerror}") from None
    if len(key) < 16:
        raise SettingsError(f"{file}: a key has at least 16 characters")
    return key


def has_key(key: str, authorization: str) -> bool:
    """Return whether an Authorization header has the key as its bearer token."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and _same(given.strip(), key)


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())


class KeyGuard:
    """An ASGI application that passes requests with the key to `app`, and rejects all others.

    `cookie` is the name of this page's cookie. Requests for `open_paths` need no key. A request for HEALTH gets "ok".
    `on_admitted(client)` is called with the address and port of each client whose request is passed on.
    """

    def __init__(
        self,
        app: Application,
        key: str,
        cookie: str,
        open_paths: frozenset[str],
        *,
        is_secure: bool = False,
        on_admitted: Callable[[Any], None] = lambda client: None,
    ) -> None:
        self.app = app
        self._on_admitted = on_admitted
        self._key = key
        self._cookie = cookie
        self._open_paths = open_paths
        self._attributes = "Path=/; HttpOnly; SameSite=Lax" + ("; Secure" if is_secure else "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        if kind == "http" and scope["path"] == HEALTH:
            await _respond(send, 200, [(b"content-type", b"text/plain; charset=utf-8")], b"ok\n")
            return
        if kind == "http" and scope["path"] in self._open_paths:
            self._on_admitted(scope.get("client"))
            await self.app(scope, receive, send)
            return
        if not _is_own(scope):
            await self._refuse(scope, receive, send, _ANOTHER_SITE)
            return
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = dict(query).get(_PARAMETER)
        if kind == "http" and given is not None and _same(given, self._key):
            rest = urlencode([each for each in query if each[0] != _PARAMETER])
            path = "/" + quote(scope["path"].lstrip("/"))  # one slash: two would begin the name of another site
            await self._redirect(send, path + (f"?{rest}" if rest else ""))
        elif self._has_cookie(scope) or has_key(self._key, _header(scope, b"authorization")):
            self._on_admitted(scope.get("client"))
            await self.app(scope, receive, send)
        else:
            await self._refuse(scope, receive, send, _NEEDS_KEY)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, text: bytes) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _respond(send, 403, [(b"content-type", b"text/plain; charset=utf-8")], text)

    def _has_cookie(self, scope: Scope) -> bool:
        try:
            found = SimpleCookie(_header(scope, b"cookie")).get(self._cookie)
        except CookieError:
            return False
        return found is not None and _same(found.value, self._key)

    async def _redirect(self, send: Send, path: str) -> None:
        cookie = f"{self._cookie}={self._key}; {self._attributes}"
        headers = [(b"location", path.encode()), (b"set-cookie", cookie.encode()), (b"referrer-policy", b"no-referrer")]
        await _respond(send, 303, headers, b"")


def _is_own(scope: Scope) -> bool:
    """Return whether a request comes from this page, or from a program that is not a browser.

    The cookie does not show that: browsers send it to all ports of a host, from pages of any port.
    """
    origin = _header(scope, b"origin")
    if not origin or scope.get("method") in ("GET", "HEAD"):
        return True
    try:
        where = urlsplit(origin).netloc  # "" for the opaque origin of a sandboxed frame
    except ValueError:
        return False
    return bool(where) and where in (_header(scope, b"host"), _header(scope, b"x-forwarded-host"))


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
