"""A lease in etcd: one key, through the JSON gateway of etcd's v3 API.

The key contains the record. Writes are transactions that compare its revision. The leases of etcd itself are not used:
they would be a second set of rules beside those of `election`, and a process that replaces another one needs the
record of the holder, which ends with an etcd lease.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.decodable import decodable
from atoll.errors import LeaseError
from atoll.leadership.lease_http import LeaseServer, NotConnectedError
from atoll.leadership.lease_record import LeaseRecord, StoredRecord

_Number = str | int  # the gateway writes 64-bit numbers as strings


class _KeyValue(msgspec.Struct, frozen=True):
    mod_revision: _Number
    value: str = ""


class _Range(msgspec.Struct, frozen=True):
    kvs: list[_KeyValue] = []


class _Header(msgspec.Struct, frozen=True):
    revision: _Number


class _Transaction(msgspec.Struct, frozen=True):
    header: _Header
    succeeded: bool = False


class EtcdLease:
    """A lease at a key of an etcd cluster with these servers.

    A read is tried at each server in turn. A write is not repeated after a server may have applied it: its success
    would look like a write of another process.
    """

    def __init__(self, servers: Sequence[LeaseServer], key: str) -> None:
        self.name = f"the lease {key} in etcd"
        self._servers = list(servers)
        self._key = _encoded(key.encode())

    def read(self) -> StoredRecord | None:
        found = self._post("/v3/kv/range", {"key": self._key}, _Range, is_repeatable=True)
        if not found.kvs:
            return None
        stored = found.kvs[0]
        try:
            record = msgspec.json.decode(base64.b64decode(stored.value, validate=True), type=decodable(LeaseRecord))
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise LeaseError(f"{self.name} contains something else: {error}; choose another name") from None
        return StoredRecord(record, str(stored.mod_revision))

    def write(self, record: LeaseRecord, version: str) -> StoredRecord | None:
        compared = {"key": self._key, "target": "MOD", "result": "EQUAL", "mod_revision": version or "0"}
        put = {"requestPut": {"key": self._key, "value": _encoded(msgspec.json.encode(record))}}
        transaction = {"compare": [compared], "success": [put]}
        done = self._post("/v3/kv/txn", transaction, _Transaction, is_repeatable=False)
        return StoredRecord(record, str(done.header.revision)) if done.succeeded else None

    def _post(self, path: str, body: Any, kind: type[Any], *, is_repeatable: bool) -> Any:
        """Return the reply of the first server that answers. That server is the first one next time.

        Unless the request `is_repeatable`, only servers that cannot be connected to are skipped.
        """
        error: LeaseError | None = None
        for server in tuple(self._servers):
            try:
                status, reply = server.request("POST", path, body)
                if status != 200:
                    raise server.failure(path, status, reply)
                return msgspec.convert(reply, decodable(kind))
            except msgspec.ValidationError as invalid:
                failed = LeaseError(f"{server.address} does not answer like etcd: {invalid}")
            except LeaseError as raised:
                failed = raised
            self._servers.append(self._servers.pop(0))
            error = error or failed
            if not is_repeatable and not isinstance(failed, NotConnectedError):
                raise failed
        assert error is not None
        raise error


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
