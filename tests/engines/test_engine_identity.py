"""Tests of an engine process's certificates: one per role, renewed while the process runs."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.cluster.settings import ClusterSettings
from atoll.engines import engine_identity, supervisor
from atoll.engines.engine_options import EngineOptions
from atoll.engines.hosts.hosts_engine import HostsEngine
from atoll.engines.successor_supervisor import SuccessorSupervisor
from atoll.engines.supervisor import Supervisor
from atoll.errors import ConnectError
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.roles import Role
from atoll.wire.tls.identity import Certificate, Identity
from tests.waiting import until_async


class ExpiringAuthority:
    """CA whose first certificate expires at once."""

    def __init__(self) -> None:
        self._authority = CertificateAuthority.make()
        self.issued: list[Certificate] = []

    def certificate_for(self, role: Role, name: str) -> Certificate:
        certificate = self._authority.certificate_for(role, name)
        self.issued.append(certificate if self.issued else replace(certificate, ends=time.time()))
        return self.issued[-1]


@pytest.fixture
def dialed(monkeypatch: pytest.MonkeyPatch) -> list[Identity]:
    """Return the identities that were used to connect to the controller."""
    identities: list[Identity] = []
    authority = ExpiringAuthority()

    async def dial(*_: Any, identity: Identity, **__: Any) -> Any:
        identities.append(identity)
        raise ConnectError("it restarts")

    monkeypatch.setattr(supervisor, "dial", dial)
    monkeypatch.setattr(engine_identity, "load_certificate_authority", lambda directory: authority)
    return identities


def renewals() -> int:
    return sum(each.name == "atoll-renewal" for each in threading.enumerate())


def options(tmp_path: Path, **more: Any) -> EngineOptions:
    return EngineOptions(ClusterSettings("1x1x1", engine="hosts"), str(tmp_path), listen="tls://127.0.0.1:7000", **more)


def test_an_engine_dials_again_with_the_same_certificate_renewed(tmp_path: Path, dialed: list[Identity]) -> None:
    async def main() -> None:
        before = renewals()
        given = options(tmp_path)
        engine = Supervisor(given, HostsEngine(given), asyncio.Event())
        for _ in range(2):
            with pytest.raises(ConnectError):
                await engine._dial(engine._address, 0.0)
        first, second = dialed
        assert first is second
        await until_async(lambda: first.certificate.ends > time.time() + 3600)
        assert renewals() == before + 1
        await engine.end()
        assert renewals() == before

    asyncio.run(main())


def test_a_spare_engine_dials_again_with_the_same_certificate_renewed(tmp_path: Path, dialed: list[Identity]) -> None:
    async def main() -> None:
        before = renewals()
        standby = SuccessorSupervisor(
            options(tmp_path, standby="10.0.0.1:7000", journal=str(tmp_path)), asyncio.Event()
        )
        standby._spare.offer()
        await until_async(lambda: len(dialed) > 1)
        await until_async(lambda: dialed[0].certificate.ends > time.time() + 3600)
        assert dialed[0] is dialed[1]
        assert renewals() == before + 1
        await standby.end()
        assert renewals() == before

    asyncio.run(main())
