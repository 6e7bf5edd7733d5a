"""Tests of the page and the metrics with TLS, using clients that verify certificates."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from atoll.errors import AccessError, AddressError
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.roles import Role
from atoll.web import metrics_server
from atoll.web.metrics_server import MAX_PER_ADDRESS, serve_metrics
from atoll.web.poller import Poller
from atoll.web.tls import PageTls, page_tls, tls_of_files
from atoll.wire.address import parse_address
from atoll.wire.tls.identity import Identity
from tests.certificates import identity, known_authority
from tests.cluster_process import User, free_port
from tests.web.browser import browser, needs_browser
from tests.web.cluster import ScriptedSource, serving

_SECONDS = 300.0


def believing(authority: bytes) -> ssl.SSLContext:
    """Return the TLS context of a browser or a scraper."""
    return ssl.create_default_context(cadata=authority.decode())


def scraped(tls: PageTls, ask: Callable[[int], None]) -> None:
    """Call `ask` in a thread with the port of a metrics server, and return the result."""

    async def run() -> None:
        ports: asyncio.Queue[int] = asyncio.Queue()
        serving = asyncio.create_task(
            serve_metrics(Poller(ScriptedSource()), parse_address("127.0.0.1:0"), "", ports.put_nowait, tls)
        )
        try:
            await asyncio.to_thread(ask, await ports.get())
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    asyncio.run(run())


def met(port: int, authority: CertificateAuthority, host: str = "127.0.0.1") -> int:
    """Return the serial number of the certificate that a client which trusts the authority receives, as `host`."""
    with (
        socket.create_connection(("127.0.0.1", port), _SECONDS) as sock,
        believing(authority.pem).wrap_socket(sock, server_hostname=host) as tls,
    ):
        tls.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = tls.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"atoll_cluster_info" in answer
        return int(dict(tls.getpeercert() or {})["serialNumber"], 16)


def page_of(authority: CertificateAuthority) -> PageTls:
    return PageTls(lambda: authority.page_certificate(["127.0.0.1"]), authority.pem)


# ---- certificates


def test_who_believes_the_authority_is_served_and_who_does_not_is_not():
    authority = known_authority()

    def ask(port: int) -> None:
        met(port, authority)
        with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
            met(port, authority, "127.0.0.2")
        with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|unable to get local issuer"):
            met(port, CertificateAuthority.make("another's"))

    scraped(page_of(authority), ask)


def test_handshakes_of_scrapers_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_server, "_REQUEST_SECONDS", _SECONDS)
    authority = known_authority()

    def ask(port: int) -> None:
        flood = [socket.create_connection(("127.0.0.1", port), _SECONDS) for _ in range(MAX_PER_ADDRESS + 1)]
        assert flood[0].recv(1) == b""
        met(port, authority)
        for each in flood:
            each.close()

    scraped(page_of(authority), ask)


def test_a_renewed_certificate_is_served_to_who_comes_next():
    authority = known_authority()
    tls = page_of(authority)

    def ask(port: int) -> None:
        before = met(port, authority)
        assert met(port, authority) == before
        tls.renew()
        assert met(port, authority) != before

    scraped(tls, ask)


def test_what_cannot_be_used_does_not_take_the_place_of_what_can(tmp_path: Path):
    authority, file = known_authority(), tmp_path / "page.pem"
    file.write_bytes(authority.page_certificate(["127.0.0.1"]))
    tls = tls_of_files(file, None)

    def ask(port: int) -> None:
        before = met(port, authority)
        for content in (b"", authority.page_certificate(["127.0.0.1"]).partition(b"-----BEGIN PRIVATE")[0]):
            file.write_bytes(content)
            with pytest.raises(AccessError, match="cannot use"):
                tls.renew()
        file.unlink()
        with pytest.raises(AccessError, match=r"page\.pem: No such file"):
            tls.renew()
        assert met(port, authority) == before

    scraped(tls, ask)


def test_a_certificate_is_renewed_while_it_is_served():
    authority, made = known_authority(), []

    def pem() -> bytes:
        made.append(1)
        return authority.page_certificate(["127.0.0.1"])

    async def run() -> None:
        keeping = asyncio.create_task(PageTls(pem, every=0.001).keep_new())
        async with asyncio.timeout(_SECONDS):
            while len(made) < 3:
                await asyncio.sleep(0.001)
        keeping.cancel()

    asyncio.run(run())


def test_a_certificate_needs_its_own_key_without_a_passphrase(tmp_path: Path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=a"]
    subprocess.run([*make, "-nodes", "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls_of_files(certificate, key)
    subprocess.run([*make, "-nodes", "-keyout", key, "-out", tmp_path / "b"], check=True, capture_output=True)
    with pytest.raises(AccessError, match="its private key"):
        tls_of_files(certificate, key)
    subprocess.run(
        [*make, "-passout", "pass:abcdef", "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    with pytest.raises(AccessError, match="without a passphrase"):
        tls_of_files(certificate, key)


def test_a_pages_certificate_opens_no_door_of_the_cluster():
    """A certificate of the page cannot authenticate a client or replace the controller."""
    authority = known_authority()
    page = authority.page_certificate(["engine", "127.0.0.1"])
    certificate = identity(Role.CLIENT).certificate
    posing = Identity(type(certificate)(page, page, authority.pem, Role.ENGINE, certificate.begins, certificate.ends))
    honest = identity(Role.CONTROLLER)
    assert "unsuitable certificate purpose" in handshake(posing, honest)
    assert "Hostname mismatch" in handshake(identity(Role.HOST), posing)
    with pytest.raises(AccessError, match="the name of a role"):
        authority.page_certificate(["controller.atoll"])


def handshake(client: Identity, server: Identity) -> str:
    """Return the error of a client that connects to the server and expects a controller, or ""."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialing = client.dialing.wrap_bio(to_client, to_server, server_hostname="controller.atoll")
    serving = server.serving.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for end in (dialing, serving):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return str(error)
    return ""


# ---- where


@pytest.mark.parametrize(
    ("address", "insecure", "is_plain"),
    [
        ("127.0.0.1:0", False, True),
        ("localhost:0", False, True),
        ("192.0.2.1:0", True, True),
        ("192.0.2.1:0", False, False),
        ("0.0.0.0:0", False, False),
        ("tls://127.0.0.1:0", False, False),
        ("tls://192.0.2.1:0", True, False),
    ],
)
def test_strangers_are_served_with_tls_or_not_at_all(address: str, insecure: bool, is_plain: bool, tmp_path: Path):
    where = parse_address(address)
    if is_plain:
        assert page_tls(where, None, None, str(tmp_path), insecure) is None
        return
    with pytest.raises(AddressError, match="give --tls-certificate and --tls-key, or --insecure"):
        page_tls(where, None, None, str(tmp_path), insecure)
    known_authority().save(tmp_path / "authority.pem")
    signed = page_tls(where, None, None, str(tmp_path), insecure)
    assert signed is not None
    assert signed.authority == known_authority().pem


def test_a_key_without_a_certificate_is_refused():
    with pytest.raises(AccessError, match=r"--tls-key .* needs --tls-certificate"):
        page_tls(parse_address("127.0.0.1:0"), None, Path("key"), "", False)


# ---- beside a real cluster


@pytest.fixture(scope="module")
def up(program_cache: Path) -> Iterator[User]:
    """Return a user whose cluster is up, on TCP with a certificate authority."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as user:
        listen = f"127.0.0.1:{free_port()}"
        user.atoll("up", "--islands", "1x1x1", "--platform", "null", "--listen", listen).check()
        yield user
        user.atoll("down").check()


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        return None


def get(url: str, authority: Path, **headers: str) -> tuple[int, dict[str, str], str]:
    """Return the response to a client that verifies certificates and follows no redirects."""
    opener = build_opener(HTTPSHandler(context=believing(authority.read_bytes())), _NoRedirect)
    try:
        with opener.open(Request(url, headers=headers), timeout=_SECONDS) as reply:
            return reply.status, dict(reply.headers), reply.read().decode()
    except HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read().decode()


def test_a_page_with_tls_is_believed_by_the_clusters_authority(up: User, tmp_path: Path):
    pytest.importorskip("nicegui", reason="the extra web is not installed")
    authority = tmp_path / "authority.pem"
    with serving(up, "web", "--tls-authority", str(authority), listen="tls://127.0.0.1:0") as url:
        assert url.startswith("https://127.0.0.1:")
        assert b"PRIVATE" not in authority.read_bytes()
        status, headers, _ = get(url, authority)
        assert (status, headers["location"]) == (303, "/")
        cookie, *attributes = headers["set-cookie"].split("; ")
        assert {"Secure", "HttpOnly", "SameSite=Lax"} <= set(attributes)
        base = url.partition("?")[0]
        assert get(base, authority)[0] == 403
        assert get(base + "healthz", authority)[::2] == (200, "ok\n")
        status, _, page = get(base, authority, cookie=cookie)
        assert (status, "Atoll" in page) == (200, True)
        assert "atoll_island_state" in get(base + "metrics", authority)[2]
        other = tmp_path / "other.pem"
        other.write_bytes(known_authority().pem)
        with pytest.raises(URLError, match="CERTIFICATE_VERIFY_FAILED"):
            get(base, other)
        port = urlsplit(url).port
        assert port is not None
        with socket.create_connection(("127.0.0.1", port), _SECONDS) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"HTTP" not in sock.recv(100), "all connections use TLS"


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_a_page_with_tls(up: User, tmp_path: Path):
    certificate = tmp_path / "page.pem"
    certificate.write_bytes(known_authority().page_certificate(["127.0.0.1"]))
    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    known = b64encode(sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()).decode()

    async def look(url: str) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            # The client trusts this key's certificate, as if a user had installed its authority in a browser.
            async with browser(Path(directory), f"--ignore-certificate-errors-spki-list={known}") as page:
                await page.open(url)
                await page.until("document.querySelectorAll('[data-table=Devices] tbody tr').length === 1")
                assert {urlsplit(each).scheme for each in page.asked if each.startswith(("http", "ws"))} <= {
                    "https",
                    "wss",
                }

    with serving(up, "web", "--tls-certificate", str(certificate)) as url:
        asyncio.run(look(url))


def test_metrics_with_tls_and_the_users_own_certificate(up: User, tmp_path: Path):
    certificate, authority = tmp_path / "page.pem", tmp_path / "authority.pem"
    certificate.write_bytes(known_authority().page_certificate(["127.0.0.1", "localhost"]))
    authority.write_bytes(known_authority().pem)
    (tmp_path / "key").write_text("the key of this test\n")
    with serving(up, "metrics", "--tls-certificate", str(certificate), "--key-file", str(tmp_path / "key")) as url:
        assert url.startswith("https://")
        assert get(url, authority)[0] == 401
        status, _, text = get(url, authority, authorization="Bearer the key of this test")
        assert (status, "atoll_island_state" in text) == (200, True)
