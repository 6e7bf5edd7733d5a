"""Who may see the page: whoever has its key, which is in the URL that `atoll web` prints.

The key becomes a cookie at the first request, so that it is in no further URL. Other sites' pages cannot use the
cookie (SameSite), nor can those of other ports of the same host, whose requests name another origin; nor can other
users of the machine connect without the key. With TLS the cookie never leaves in the
clear (Secure). Metrics are open on loopback, as scrapers expect; elsewhere they want the key, too, as a bearer token.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from atoll.errors import SettingsError

METRICS = "/metrics"
_PARAMETER = "key"
_WANTS_KEY = b"this page wants its key: open the URL that `atoll web` has printed\n"
_ANOTHER_SITE = b"the request comes from another site's page\n"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def new_key() -> str:
    return secrets.token_urlsafe(24)


def read_key(file: Path) -> str:
    """The key of this file, which is made, for its owner alone to read, where it does not exist."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        key = file.read_text().strip()
        if len(key) < 16:
            raise SettingsError(f"{file}: a key has 16 characters or more") from None
        return key
    except OSError as error:
        raise SettingsError(f"cannot write {file}: {error.strerror}") from None
    key = new_key()
    with os.fdopen(descriptor, "w") as stream:
        stream.write(key + "\n")
    return key


def has_key(key: str, authorization: str) -> bool:
    """Whether an Authorization header has the key as its bearer token."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and _same(given.strip(), key)


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())


class KeyGuard:
    """An ASGI application that lets requests with the key through to another one; `cookie` is a name of its own.

    `on_admitted(client)` is called with the address and port of a client whose request is let through.
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
            path = "/" + quote(scope["path"].lstrip("/"))  # one slash: what follows two is another site
            await self._redirect(send, path + (f"?{rest}" if rest else ""))
        elif self._has_cookie(scope) or has_key(self._key, _header(scope, b"authorization")):
            self._on_admitted(scope.get("client"))
            await self.app(scope, receive, send)
        else:
            await self._refuse(scope, receive, send, _WANTS_KEY)

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
    """Return whether a request comes from this page, or from a program that is no browser.

    The cookie does not tell: browsers send it to all ports of a host, for the pages of another port, too.
    """
    origin = _header(scope, b"origin")
    if not origin or scope.get("method") in ("GET", "HEAD"):
        return True
    where = urlsplit(origin).netloc  # "" for the opaque origin of a sandboxed frame
    return bool(where) and where in (_header(scope, b"host"), _header(scope, b"x-forwarded-host"))


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
