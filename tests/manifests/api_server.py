"""A real API server of Kubernetes with RBAC, on etcd, for tests: the program in KUBE_APISERVER. It starts no pods."""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from atoll.errors import LeaseError
from atoll.leadership.lease_http import LeaseServer
from tests.cluster_process import free_port
from tests.leadership.lease_servers import etcd_process, server_certificates

_ADMIN = "administrator"
_START_SECONDS = 120.0
# Kubernetes 1.20 has budgets only in this version, with the same fields.
BUDGETS = {"policy/v1": "policy/v1beta1"}
# The parts of JobSet's definition that the server needs to store JobSets. It checks none of their fields.
JOBSET = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "jobsets.jobset.x-k8s.io",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/jobset"},
    },
    "spec": {
        "group": "jobset.x-k8s.io",
        "names": {"kind": "JobSet", "listKind": "JobSetList", "plural": "jobsets", "singular": "jobset"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1alpha2",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


class ApiServer:
    """API server. Requests are those of an administrator, unless they have a token."""

    def __init__(self, program: str, etcd: str, directory: Path) -> None:
        self._directory = directory
        port = free_port()
        files = server_certificates(directory)
        self.authority = files["ATOLL_LEADER_LEASE_AUTHORITY"]
        key = rsa.generate_private_key(65537, 2048)
        encoded = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        (directory / "accounts.key").write_bytes(encoded)
        (directory / "tokens.csv").write_text(f"{_ADMIN},admin,1,system:masters\n")
        self._command = [
            program,
            f"--etcd-servers=http://{etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={files['ATOLL_LEADER_LEASE_CERTIFICATE']}",
            f"--tls-private-key-file={files['ATOLL_LEADER_LEASE_KEY']}",
            f"--cert-dir={directory}",
            "--authorization-mode=RBAC",
            f"--token-auth-file={directory / 'tokens.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={directory / 'accounts.key'}",
            f"--service-account-key-file={directory / 'accounts.key'}",
            "--service-cluster-ip-range=10.0.0.0/24",
        ]
        self.host, self.port = "127.0.0.1", port
        self._server = LeaseServer(
            f"{self.host}:{port}", "the API server", ssl.create_default_context(cafile=str(self.authority)), 30.0
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it is ready."""
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(LeaseError):
                if self._server.request("GET", "/readyz", headers=self._authorization(_ADMIN))[0] == 200:
                    return
            assert self._process.poll() is None, (self._directory / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (self._directory / "log").read_text()[-3000:]
            time.sleep(0.3)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def request(self, method: str, path: str, body: Any = None, token: str = _ADMIN) -> tuple[int, Any]:
        return self._server.request(method, path, body, self._authorization(token))

    def version(self) -> str:
        version: str = self.request("GET", "/version")[1]["gitVersion"]
        return version

    def create(self, document: dict[str, Any], namespace: str) -> tuple[int, Any]:
        """Create an object in a namespace, or without one for kinds that have none."""
        document = {**document, "apiVersion": BUDGETS.get(document["apiVersion"], document["apiVersion"])}
        return self.request("POST", path_of(document, namespace), document)

    def token(self, namespace: str, account: str) -> str:
        """Return a token of a ServiceAccount, as in a pod's volume."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        status, reply = self.request("POST", path, request | {"spec": {"expirationSeconds": 3600}})
        assert status == 201, reply
        token: str = reply["status"]["token"]
        return token

    @staticmethod
    def _authorization(token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}


_PLURALS = {"NetworkPolicy": "networkpolicies"}


def path_of(document: dict[str, Any], namespace: str = "") -> str:
    """Return the path of the objects of a kind."""
    version, kind = document["apiVersion"], document["kind"]
    prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
    where = f"/namespaces/{namespace}" if namespace else ""
    return f"{prefix}{where}/{_PLURALS.get(kind, kind.lower() + 's')}"


@contextlib.contextmanager
def api_server(directory: Path) -> Iterator[ApiServer]:
    """Run the API server with the definition of JobSets. Skip the test if the program is missing."""
    program = os.environ.get("KUBE_APISERVER")
    if not program:
        pytest.skip("KUBE_APISERVER is not set: build kube-apiserver by scripts/build-kube-apiserver")
    with etcd_process(directory) as (_, etcd):
        server = ApiServer(program, etcd, directory)
        try:
            server.start()
            status, reply = server.create(JOBSET, "")
            assert status == 201, reply
            yield server
        finally:
            server.kill()
