"""Tests of `atoll tenants`, and of a cluster with many tenants."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cluster.tenant_settings import token_hash
from tests.cluster_process import User

TOKENS = {f"tenant-{number}": f"{number:032}" for number in range(1000)}


@pytest.fixture(scope="module")
def up(program_cache: Path) -> Iterator[User]:
    """Return a user whose cluster has a thousand tenants."""
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as user:
        file = Path(directory) / "tenants.toml"
        file.write_text("\n".join(f'[tenant.{name}]\ntoken = "{token}"' for name, token in TOKENS.items()))
        user.atoll("up", "--islands", "1x1x1", "--platform", "null", "--tenants", str(file)).check()
        file.unlink()
        yield user
        user.atoll("down").check()
        assert user.leftovers() == []


def known(user: User, **env: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in json.loads(user.atoll("tenants", "--json", **env).check().stdout)}


def test_a_thousand_tenants_are_on_no_command_line(up: User) -> None:
    assert known(up).keys() == {"default", *TOKENS}
    output = list(up.commands().values())
    assert any("atoll.controller_process.controller_main" in each for each in output)
    assert not any(token_hash(TOKENS["tenant-7"]) in each for each in output)
    assert known(up, ATOLL_TOKEN=TOKENS["tenant-7"]).keys() == {"tenant-7"}


def test_a_tenant_comes_is_changed_and_goes_while_the_cluster_runs(up: User, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("g" * 32)
    token = {"ATOLL_TOKEN": "g" * 32}
    up.atoll(
        "tenants", "add", "green", "--token-file", str(tmp_path / "token"), "--share", "2", "--uploads", "9"
    ).check()
    green = known(up, **token)["green"]
    assert (green["share"], green["uploads"], green["role"]) == (2.0, 9, "user")
    up.atoll("tenants", "set", "green", "--memory", "8GiB", "--priority", "-1").check()
    green = known(up, **token)["green"]
    assert (green["share"], green["priority"], green["memory"], green["uploads"]) == (2.0, -1, 8 << 30, 9)
    assert "only its operators may do this" in up.atoll("tenants", "set", "green", "--share", "9", **token).error
    (tmp_path / "new").write_text("h" * 32)
    up.atoll("tenants", "set", "green", "--token-file", str(tmp_path / "new")).check()
    assert "token" in up.atoll("tenants", **token).error
    assert known(up, ATOLL_TOKEN="h" * 32).keys() == {"green"}
    nothing = up.atoll("tenants", "set", "green")
    assert (nothing.returncode, "nothing to change" in nothing.stderr) == (2, True)
    up.atoll("tenants", "remove", "green").check()
    assert "token" in up.atoll("tenants", ATOLL_TOKEN="h" * 32).error
