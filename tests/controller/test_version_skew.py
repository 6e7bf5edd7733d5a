"""Tests of the rules for peers of other versions, by role. docs/operate/upgrade.md has them in a table."""

from __future__ import annotations

import pytest

from atoll.errors import Code
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.security.tokens import digest
from tests.controller.play import Cluster, joined

ROLES = ("proxy", "operator", "worker", "agent")


def answer(role: str, version: str, protocol: int) -> m.Refused | None:
    """Return the refusal of a peer with this version, or None if it is admitted."""
    cluster: Cluster = joined("1x1x1")
    connection = 99
    cluster.event(e.ConnectionOpened(0.0, connection, "a secret"))
    cluster.receive(connection, m.Hello(protocol, role, digest(""), 7, version, "script.py"))
    sent = [each.message for each in cluster.flush() if isinstance(each, a.Send) and each.connection == connection]
    return next((each for each in sent if isinstance(each, m.Refused)), None)


@pytest.mark.parametrize("role", ROLES)
def test_a_peer_with_another_version_and_the_same_protocol_is_admitted(role: str):
    assert answer(role, "99.0", m.PROTOCOL) is None


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("protocol", [m.PROTOCOL - 1, m.PROTOCOL + 1])
def test_a_peer_with_another_protocol_is_refused_with_both_versions(role: str, protocol: int):
    refused = answer(role, "99.0", protocol)
    assert refused is not None
    assert refused.status.code == Code.FAILED_PRECONDITION
    assert f"speaks protocol {m.PROTOCOL}, the {role} (atoll 99.0) speaks {protocol}" in refused.status.message
