"""The limits of a tenant as text, with what it has of them."""

from __future__ import annotations

import msgspec
import pytest

from atoll.cluster.tenant_settings import TenantSettings
from atoll.telemetry.snapshot import TenantSnapshot
from atoll.telemetry.tenant_limits import RATES, TEXTS, fullness, limits_of

_NUMBERS = {each.name for each in msgspec.structs.fields(TenantSettings) if "int" in str(each.type)}


def tenant(**values: object) -> TenantSnapshot:
    defaults = {name: getattr(TenantSettings(""), name) for name in RATES}
    return msgspec.convert({"name": "ana", **defaults, **values}, TenantSnapshot)


def test_every_limit_has_a_text() -> None:
    assert {*TEXTS, *RATES} == _NUMBERS - {"priority"}
    for name in (*TEXTS, *RATES):
        assert any("7" in text for text in limits_of(tenant(**{name: 7}))), name


def test_defaults_are_not_listed() -> None:
    assert limits_of(tenant()) == []


def test_limits_are_listed_with_what_the_tenant_has_of_them() -> None:
    found = tenant(
        memory=2048,
        device_bytes=((0, 512), (3, 1024)),
        total_memory=8192,
        bytes=1536,
        sessions=2,
        open_sessions=1,
        upload_rate=0,
        suspended_seconds=12.4,
    )
    assert limits_of(found) == [
        "suspended for 12 s",
        "1.0 KiB of 2.0 KiB per device",
        "1.5 KiB of 8.0 KiB in total",
        "1 of 2 sessions",
        "sending at any rate",
    ]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({}, 0.0),
        ({"bytes": 100}, 0.0),
        ({"bytes": 100, "total_memory": 400}, 0.25),
        ({"bytes": 100, "total_memory": 400, "memory": 100, "device_bytes": ((0, 50), (1, 10))}, 0.5),
        ({"bytes": 100, "total_memory": 50}, 1.0),
    ],
)
def test_the_bar_shows_the_memory_limit_that_is_closest(values: dict[str, object], part: float) -> None:
    assert fullness(tenant(**values)) == part
