"""A lease that is a Lease of Kubernetes (coordination.k8s.io/v1), with the service account of the pod.

The fields are those of client-go's leader election. An annotation has the standby. Writes keep all other metadata.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from atoll.decodable import decodable
from atoll.errors import LeaseError
from atoll.leadership.lease_http import LeaseServer
from atoll.leadership.lease_record import LEASE_SECONDS, LeaseRecord, StoredRecord

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
STANDBY_ANNOTATION = "atoll/standby"
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    annotations: dict[str, str] | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_transitions: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None


class _Lease(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec = _Spec()


class KubernetesLease:
    """A Lease in a namespace. The token is read for each request, because Kubernetes replaces it."""

    def __init__(self, server: LeaseServer, namespace: str, name: str, account: Path = SERVICE_ACCOUNT) -> None:
        self.name = f"the lease {namespace}/{name} in Kubernetes"
        self._server = server
        self._namespace = namespace
        self._lease = name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._account = account
        self._metadata: dict[str, Any] = {}  # of the object that was read or written last

    def read(self) -> StoredRecord | None:
        status, reply = self._request("GET", f"{self._path}/{self._lease}")
        if status == 404:
            return None
        if status != 200:
            raise self._server.failure(f"GET {self._lease}", status, reply)
        return self._stored(reply)

    def write(self, record: LeaseRecord, version: str) -> StoredRecord | None:
        metadata: dict[str, Any] = (
            {**self._metadata} if version else {"name": self._lease, "namespace": self._namespace}
        )
        metadata["annotations"] = {**(metadata.get("annotations") or {}), STANDBY_ANNOTATION: record.standby}
        spec = {
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "leaseTransitions": record.transitions,
            "acquireTime": _time(record.acquired),
            "renewTime": _time(record.renewed),
        }
        if record.holder:  # the API refuses an empty text
            spec["holderIdentity"] = record.holder
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        if version:
            metadata["resourceVersion"] = version
            status, reply = self._request("PUT", f"{self._path}/{self._lease}", lease)
        else:
            status, reply = self._request("POST", self._path, lease)
        if status in (404, 409):  # it was removed, or has another version
            return None
        if status not in (200, 201):
            raise self._server.failure(f"the update of {self._lease}", status, reply)
        return self._stored(reply)

    def _request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        try:
            token = (self._account / "token").read_text("ascii").strip()
        except OSError as error:
            raise LeaseError(
                f"{self.name} needs the token of a service account: cannot read {self._account / 'token'}: "
                f"{error.strerror}"
            ) from None
        except UnicodeDecodeError:
            token = ""
        if not token or not token.isprintable():
            raise LeaseError(f"{self.name} needs the token of a service account: {self._account / 'token'} has none")
        return self._server.request(method, path, body, {"Authorization": f"Bearer {token}"})

    def _stored(self, reply: Any) -> StoredRecord:
        try:
            lease = msgspec.convert(reply, decodable(_Lease))
            acquired, renewed = _seconds(lease.spec.acquire_time), _seconds(lease.spec.renew_time)
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            raise LeaseError(f"{self._server.address} does not answer like Kubernetes: {error}") from None
        self._metadata = reply["metadata"]
        record = LeaseRecord(
            lease.spec.holder_identity or "",
            lease.spec.lease_transitions or 0,
            (lease.metadata.annotations or {}).get(STANDBY_ANNOTATION, ""),
            acquired,
            renewed,
        )
        return StoredRecord(record, lease.metadata.resource_version)


def api_server(environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> LeaseServer:
    """Return the API server of the Kubernetes cluster that this pod belongs to. Raise LeaseError outside of a pod."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    if not host:
        raise LeaseError("a lease of Kubernetes needs a pod: KUBERNETES_SERVICE_HOST is not set")
    if not (port.isascii() and port.isdigit()):
        raise LeaseError(f"a lease of Kubernetes needs a pod: KUBERNETES_SERVICE_PORT_HTTPS is {port[:100]!r}")
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise LeaseError(
            f"a lease of Kubernetes needs a service account: {account / 'ca.crt'}: {error.strerror}"
        ) from None
    return LeaseServer(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "the API server", tls)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(_TIME)


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
