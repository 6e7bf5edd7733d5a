"""Tests that a service does not repeat a start that always fails."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from atoll.cluster.settings import ClusterSettings
from atoll.journal import files
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Journal
from atoll.journal.persisted_state import PersistedCluster, PersistedState, encode_persisted
from tests.cluster_process import User

OPERATE = Path(__file__).resolve().parents[2] / "docs" / "operate"


def test_a_start_without_the_tenant_of_a_persisted_session_has_its_own_exit_status(user: User, tmp_path: Path) -> None:
    shapes = ClusterSettings("1x1x1").topology.shapes
    state = PersistedState(PersistedCluster(shapes, {3: "ana"}), b"", b"", {3: "a secret"})
    journal = Journal(JournalDirectory(tmp_path / "journal"), 5, 1, bytes)
    journal.begin()
    journal.end(encode_persisted(state))
    ended = user.atoll("up", "--foreground", "--islands", "1x1x1", "--journal", str(tmp_path / "journal"))
    assert ended.returncode == 78
    assert "this cluster has no tenant ana" in ended.stderr


def test_a_start_with_the_journal_of_another_protocol_has_its_own_exit_status(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FileHeader", partial(files.FileHeader, protocol=999))
    journal = Journal(JournalDirectory(tmp_path / "journal"), 5, 1, bytes)
    journal.begin()
    journal.close()
    ended = user.atoll("up", "--foreground", "--islands", "1x1x1", "--journal", str(tmp_path / "journal"))
    assert ended.returncode == 78
    assert "protocol 999" in ended.stderr


@pytest.mark.parametrize("page", [page for page in OPERATE.glob("*.md") if "Restart=always" in page.read_text()])
def test_each_unit_of_the_documentation_ends_at_a_refused_start(page: Path) -> None:
    units = [each for each in re.findall(r"```ini\n(.*?)```", page.read_text(), re.DOTALL) if "Restart=always" in each]
    assert units
    assert all("\nRestartPreventExitStatus=2 78\n" in each for each in units)
