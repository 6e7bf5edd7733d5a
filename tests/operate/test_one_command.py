"""Tests that the command `atoll` imports only the subcommand that it runs."""

from __future__ import annotations

import sys

import pytest

from atoll.operate.command import command_line as command


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "freeze_gc", lambda: None)  # of the process that runs the tests
    monkeypatch.setattr(command.app, "registered_commands", command.app.registered_commands)
    monkeypatch.setattr(command.app, "registered_groups", command.app.registered_groups)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command. Return how many commands and groups it has read."""
    monkeypatch.setattr(sys, "argv", ["atoll", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    return len(command.app.registered_commands) + len(command.app.registered_groups)


@pytest.mark.parametrize("name", ["status", "add-island", "tenants"])
def test_its_help_is_shown_and_other_commands_are_not_read(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, name, "--help") == 1
    assert f"Usage: atoll {name} " in capsys.readouterr().out


@pytest.mark.parametrize("first", ["--help", "sttatus"])
def test_without_a_known_command_all_are_read(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, first) > 20
