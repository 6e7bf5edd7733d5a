"""Tests that a tenant whose messages trigger a bug of the controller is suspended, and that these restarts do not
count.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.errors import Code, Status
from atoll.protocol import messages as m
from atoll.state.offenses import MAX_CRASHES
from atoll.wire.framing import encode
from tests.cluster_process import User
from tests.faults import VARIABLE, environment

TOKENS = {name: f"the token of {name}, which is long" for name in ("ana", "abe", "ben", "op")}
SECONDS = 60.0
POISON = 77
_PROXIES = "atoll.controller.sessions.proxy_requests:ProxyMessages"
_FAULTS = {
    f"{_PROXIES}._await": f"raises_if:arguments[2].wait == {POISON}",
    f"{_PROXIES}._make_error": f"raises_if:arguments[2].handles[0] == {POISON}",
}
_ANSWERS = (m.Welcome, m.Refused, m.Closing, m.Awaited)
_TAGS = {each.__struct_config__.tag: each for each in _ANSWERS}


@pytest.fixture
def user(module_directory: Path, program_cache: Path) -> Iterator[User]:
    tenants = module_directory / "tenants.toml"
    lines = [f'[tenant.{name}]\ntoken = "{token}"\n' for name, token in TOKENS.items()]
    tenants.write_text("".join(lines) + 'role = "operator"\n')
    faults = environment(_FAULTS)
    with User(module_directory, program_cache, **{name: faults[name] for name in (VARIABLE, "PYTHONPATH")}) as user:
        journal = str(module_directory / "journal")
        arguments = ("--platform", "null", "--islands", "1x1x1", "--tenants", str(tenants), "--journal", journal)
        user.atoll("up", *arguments).check()
        yield user
        user.atoll("down", ATOLL_TOKEN=TOKENS["op"]).check()


class Client:
    """Proxy that exchanges messages with the controller directly. It reconnects until a controller is available."""

    def __init__(self, path: str, tenant: str) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(SECONDS)
            try:
                self._socket.connect(path)
                self._socket.sendall(encode(m.Hello(m.PROTOCOL, "proxy", TOKENS[tenant], 1, "test", tenant)))
                self.first = self.next()
                return
            except OSError:
                self._socket.close()
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def send(self, message: object) -> None:
        self._socket.sendall(encode(message))

    def next(self) -> m.Welcome | m.Refused | m.Closing | m.Awaited:
        """Return the next relevant message. Raise ConnectionError at the end."""
        while True:
            (length,) = struct.unpack("<I", self._read(4))
            body = self._read(length & ((1 << 29) - 1))
            if length < 1 << 29 and (kind := _TAGS.get(msgspec.msgpack.decode(body)[0])) is not None:
                return msgspec.msgpack.decode(body, type=kind)

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            some = self._socket.recv(count - len(found))
            if not some:
                raise ConnectionError
            found += some
        return found

    def close(self) -> None:
        self._socket.close()


def test_a_tenant_that_makes_the_controller_fail_is_suspended_and_the_cluster_continues(user: User) -> None:
    path = f"{user.runtime}/atoll/default/controller.sock"
    for _ in range(MAX_CRASHES):
        client = Client(path, "ana")
        assert isinstance(client.first, m.Welcome), client.first
        client.send(m.Await(POISON, ()))
        closing = client.next()
        assert isinstance(closing, m.Closing)
        assert "the controller failed at a message of this client (Await: TypeError" in closing.status.message
        client.close()
    refused = Client(path, "ana")
    assert isinstance(refused.first, m.Refused)
    assert refused.first.status.code == Code.RESOURCE_EXHAUSTED
    assert "tenant ana cannot open sessions for another" in refused.first.status.message
    refused.close()
    client = Client(path, "abe")
    client.send(
        m.MakeError(tuple(range(POISON, POISON + 1000)), Status(Code.INTERNAL, "a bug"))
    )  # it waits in its inbox
    closing = client.next()
    assert isinstance(closing, m.Closing)
    assert "the controller failed at a message of this client (TypeError: an injected bug" in closing.status.message
    client.close()
    honest = Client(path, "ben")
    honest.send(m.Await(1, ()))
    answer = honest.next()
    assert isinstance(answer, m.Awaited)
    assert answer.status.ok
    honest.close()
    log = (user.runtime / "atoll/default/log").read_text()
    assert "(charged to a tenant); restarting it" in log  # the log omits repetitions
    assert log.count("controller restarted: it continues in term") == MAX_CRASHES + 1
