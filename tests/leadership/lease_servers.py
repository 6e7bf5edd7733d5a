"""Servers of leases for tests: small HTTP servers in this process, and etcd if it is installed."""

from __future__ import annotations

import base64
import contextlib
import http.server
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from atoll.errors import LeaseError
from atoll.leadership.etcd_lease import EtcdLease
from atoll.leadership.lease_http import LeaseServer

ETCD = shutil.which("etcd")
TOKEN = "a token"
_START_SECONDS = 60.0
_MAX_STARTS = 5


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        status, reply = self.server.answer(  # type: ignore[attr-defined]
            self.command, self.path, json.loads(body) if body else None, self.headers.get("Authorization", "")
        )
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class FakeServer(http.server.ThreadingHTTPServer):
    """HTTP server in threads of this process, by default on loopback."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.lock = threading.Lock()
        self.revision = 0
        self.address = f"{host}:{self.server_port}"

    def answer(self, method: str, path: str, body: Any, authorization: str) -> tuple[int, Any]:
        raise NotImplementedError

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore failed handshakes, which some tests cause."""

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class FakeEtcd(FakeServer):
    """The requests of etcd's JSON gateway that a lease sends, for any keys."""

    def __init__(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        super().__init__(tls, host)
        self.values: dict[str, tuple[int, str]] = {}

    def answer(self, method: str, path: str, body: Any, authorization: str) -> tuple[int, Any]:
        with self.lock:
            if path == "/v3/kv/range":
                found = self.values.get(body["key"])
                header = {"header": {"revision": str(self.revision)}}
                if found is None:
                    return 200, header
                key_value = {"key": body["key"], "mod_revision": str(found[0]), "value": found[1]}
                return 200, {**header, "kvs": [key_value], "count": "1"}
            if path == "/v3/kv/txn":
                (compare,), (success,) = body["compare"], body["success"]
                revision = self.values.get(compare["key"], (0, ""))[0]
                if revision != int(compare["mod_revision"]):
                    return 200, {"header": {"revision": str(self.revision)}}
                self.revision += 1
                put = success["requestPut"]
                self.values[put["key"]] = self.revision, put["value"]
                return 200, {"header": {"revision": str(self.revision)}, "succeeded": True}
            return 404, {"error": "Not Found", "message": "Not Found", "code": 5}


class FakeKubernetes(FakeServer):
    """The API of Kubernetes Leases, with conflicts of resource versions, for holders of TOKEN."""

    _PATH = "/apis/coordination.k8s.io/v1/namespaces/atoll/leases"

    def __init__(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        super().__init__(tls, host)
        self.leases: dict[str, dict[str, Any]] = {}

    def answer(self, method: str, path: str, body: Any, authorization: str) -> tuple[int, Any]:
        with self.lock:
            if authorization != f"Bearer {TOKEN}":
                return self._status(401, "Unauthorized")
            if not path.startswith(self._PATH):
                return self._status(403, f"leases is forbidden: cannot {method.lower()} resource")
            name = path.removeprefix(self._PATH).removeprefix("/")
            match method:
                case "GET" if name in self.leases:
                    return 200, self.leases[name]
                case "POST" if not name:
                    name = body["metadata"]["name"]
                    if name in self.leases:
                        return self._status(409, f'leases "{name}" already exists')
                    return 201, self._store(name, body)
                case "PUT" if name in self.leases:
                    stored = self.leases[name]["metadata"]["resourceVersion"]
                    if body["metadata"]["resourceVersion"] != stored:
                        return self._status(409, "the object has been modified")
                    return 200, self._store(name, body)
            return self._status(404, f'leases "{name}" not found')

    def _store(self, name: str, body: Any) -> Any:
        if body["spec"].get("holderIdentity") == "":
            return self._status(422, "spec.holderIdentity: must not be empty")
        self.revision += 1
        body["metadata"]["resourceVersion"] = str(self.revision)
        body["metadata"].setdefault("uid", "1")
        self.leases[name] = body
        return body

    @staticmethod
    def _status(code: int, message: str) -> tuple[int, Any]:
        return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}


@contextlib.contextmanager
def real_etcd(directory: Path) -> Iterator[str]:
    """Run etcd with one member on loopback. Yield the address of its clients' port. Skip the test without etcd."""
    with etcd_process(directory) as (_, address):
        yield address


@contextlib.contextmanager
def etcd_process(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run etcd like `real_etcd`. Yield its process and the address."""
    if ETCD is None:
        pytest.skip("etcd is not installed: apt install etcd-server")
    process, address = _start_etcd(ETCD, directory)
    try:
        yield process, address
    finally:
        process.kill()
        process.wait()


def _start_etcd(program: str, directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start etcd. Try again if another process has taken one of its ports."""
    for attempt in range(_MAX_STARTS):
        clients, peers = (f"127.0.0.1:{_free_port()}" for _ in range(2))
        urls = {
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
        }
        process = subprocess.Popen(
            [
                program,
                f"--data-dir={directory}/etcd-{attempt}",
                f"--initial-cluster=default=http://{peers}",
                *(f"--{name}=http://{address}" for name, address in urls.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + _START_SECONDS
            while process.poll() is None:
                with contextlib.suppress(LeaseError):
                    EtcdLease([LeaseServer(clients, "etcd")], "any").read()
                    return process, clients
                assert time.monotonic() < deadline, "etcd does not answer"
                time.sleep(0.05)
        except BaseException:
            process.kill()
            process.wait()
            raise
    raise AssertionError(f"etcd has ended {_MAX_STARTS} times")


def server_certificates(directory: Path, host: str = "127.0.0.1") -> dict[str, Path]:
    """Write a certificate authority, and a certificate for `host` with its key. Return the files, by variable."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoded = certificate.public_bytes(Encoding.PEM)
    unencrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files = {
        name: directory / name
        for name in ("ATOLL_LEADER_LEASE_AUTHORITY", "ATOLL_LEADER_LEASE_CERTIFICATE", "ATOLL_LEADER_LEASE_KEY")
    }
    for file, content in zip(files.values(), (encoded, encoded, unencrypted), strict=True):
        file.write_bytes(content)
    return files


def serving_context(files: dict[str, Path], verify: ssl.VerifyMode = ssl.CERT_NONE) -> ssl.SSLContext:
    """Return the context of a server with these files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["ATOLL_LEADER_LEASE_CERTIFICATE"], files["ATOLL_LEADER_LEASE_KEY"])
    context.load_verify_locations(files["ATOLL_LEADER_LEASE_AUTHORITY"])
    context.verify_mode = verify
    return context


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def decoded(value: str) -> Any:
    """Return the JSON in a value of etcd."""
    return json.loads(base64.b64decode(value))
