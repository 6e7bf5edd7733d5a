"""Tests of a base for kustomize in a directory that also contains files of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from atoll.errors import SettingsError
from atoll.manifests.kustomize import write_base

DOCUMENTS = [{"kind": kind, "metadata": {"name": "atoll"}} for kind in ("Service", "Secret")]


@pytest.mark.parametrize("before", ["*.log\n", "*.log"])
def test_the_secrets_are_added_once_to_the_files_that_git_ignores(tmp_path: Path, before: str) -> None:
    (tmp_path / ".gitignore").write_text(before)
    for _ in range(2):
        write_base(tmp_path, DOCUMENTS)
        assert (tmp_path / ".gitignore").read_text() == "*.log\nsecrets.yaml\n"


def test_a_kustomization_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [base]\n")
    with pytest.raises(SettingsError, match="not one that Atoll wrote"):
        write_base(tmp_path, DOCUMENTS)
    assert [each.name for each in tmp_path.iterdir()] == ["kustomization.yaml"]
    assert (tmp_path / "kustomization.yaml").read_text() == "resources: [base]\n"
