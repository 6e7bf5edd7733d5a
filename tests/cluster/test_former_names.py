"""Tests of names from the previous version."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cluster.cluster_file import read_cluster_file
from atoll.cluster.settings import ClusterSettings
from atoll.operate.command.command_line import app


def test_a_variables_former_name_sets_it_unless_the_present_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_SUSPEND_FOLDER", "/former")
    assert ClusterSettings.from_environment().suspend_directory == "/former"
    monkeypatch.setenv("ATOLL_SUSPEND_DIR", "/present")
    assert ClusterSettings.from_environment().suspend_directory == "/present"


def test_a_cluster_file_may_have_a_former_key(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('suspend_folder = "/former"\n[[island]]\ndevices = 1\n')
    assert read_cluster_file(file, ClusterSettings()).suspend_directory == "/former"


def test_a_host_takes_the_former_name_of_its_coordinators_address() -> None:
    output = CliRunner().invoke(app, ["host", "--meeting", "nowhere", "--lower-than-any"]).output
    assert "--lower-than-any" in output
    assert "No such option: --meeting" not in output


@pytest.mark.parametrize(("option", "known"), [("--suspend-folder", True), ("--suspend-place", False)])
def test_a_command_takes_a_former_option(option: str, known: bool) -> None:
    output = CliRunner().invoke(app, ["up", option, "/former", "--islands", "none"]).output
    assert ("No such option" in output) != known
    assert ("none" in output) == known


def test_help_lists_no_former_option() -> None:
    output = CliRunner().invoke(app, ["up", "--help"]).output
    assert "--suspend-directory" in output
    assert "--suspend-folder" not in output
