"""Tests that the table of permissions in the documentation agrees with the code."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from atoll.protocol import messages as m
from atoll.protocol.permissions import COMMANDS, PERMISSIONS, PeerKind, Scope, scope_of, table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "permissions.md"


def test_every_message_to_the_controller_is_in_the_table():
    assert set(PERMISSIONS) == set(get_args(m.ToController))


def test_the_table_of_the_docs_is_the_codes():
    assert table() in PAGE.read_text(), "python -m atoll.protocol.permissions prints the page"


def test_a_user_changes_nothing_but_its_own():
    for message in PERMISSIONS:
        assert scope_of(PeerKind.USER, message) in (None, Scope.OWN)
    for message in (
        m.DumpRequest,
        m.StopRequest,
        m.DrainRequest,
        m.UndrainRequest,
        m.AddIslandRequest,
        m.SetTenant,
        m.RemoveTenant,
    ):
        assert scope_of(PeerKind.USER, message) is None
        assert scope_of(PeerKind.OPERATOR, message) is Scope.ALL


def test_no_tenant_says_what_hosts_and_engines_say():
    for message in (*get_args(m.FromWorker), *get_args(m.FromEngine)):
        if message not in (*get_args(m.FromProxy), *get_args(m.FromOperator)):
            assert scope_of(PeerKind.USER, message) is scope_of(PeerKind.OPERATOR, message) is None


def test_each_command_asks_something():
    assert set(COMMANDS.values()) <= set(get_args(m.FromOperator))
