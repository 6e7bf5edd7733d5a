"""A cluster with many tenants, as the command starts it."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.cluster.tenants import token_hash
from tests.cluster_process import User


def test_a_thousand_tenants_are_on_no_command_line_and_their_cluster_starts(user: User, tmp_path: Path) -> None:
    tokens = {f"tenant-{number}": f"{number:032}" for number in range(1000)}
    file = tmp_path / "tenants.toml"
    file.write_text("\n".join(f'[tenant.{name}]\ntoken = "{token}"' for name, token in tokens.items()))
    user.atoll("up", "--islands", "1x1x1", "--platform", "null", "--tenants", str(file)).check()
    known = json.loads(user.atoll("tenants", "--json").check().stdout)
    assert {each["name"] for each in known} == {"default", *tokens}
    said = [" ".join(process.cmdline()) for process in user.processes()]
    assert any("atoll.controller.main" in each for each in said)
    assert not any(token_hash(tokens["tenant-7"]) in each for each in said)
    assert "tenant-7" in user.atoll("tenants", ATOLL_TOKEN=tokens["tenant-7"]).check().stdout
    user.atoll("down").check()
    assert user.leftovers() == []
