"""Tests of the tenants' file, and of finding a token's tenant."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.cluster.tenant_settings import (
    DEFAULT_TENANT,
    LIMIT_TEXTS,
    TenantRole,
    TenantSettings,
    limit_text,
    read_tenants,
    token_hash,
)
from atoll.errors import SettingsError
from atoll.security.tokens import Tokens, digest

ALICE, BOB = "alice-token-0123456789", "bob-token-0123456789"


def written(directory: Path, text: str) -> Path:
    file = directory / "tenants.toml"
    file.write_text(text)
    return file


def test_a_file_has_all_that_a_tenant_may_have(tmp_path):
    (tmp_path / "bob.token").write_text(BOB + "\n")
    file = written(
        tmp_path,
        f"""
        [tenant.alice]
        token = "{ALICE}"
        share = 2.5
        priority = 3
        role = "operator"
        memory = "2GiB"
        devices = 8
        sessions = 4
        [tenant.bob]
        token = "./bob.token"
        """,
    )
    default, alice, bob = read_tenants(file)
    assert default == DEFAULT_TENANT
    assert (alice.share, alice.priority, alice.role, alice.memory) == (2.5, 3, TenantRole.OPERATOR, 2 << 30)
    assert (alice.devices, alice.sessions, alice.token_hash) == (8, 4, token_hash(ALICE))
    assert (bob.share, bob.role, bob.token_hash) == (1.0, TenantRole.USER, token_hash(BOB))
    assert ALICE not in repr(alice)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"missing required field `tenant`; a file of tenants has only tables \[tenant\.NAME\]"),
        (f"[tenants.a]\ntoken = '{ALICE}'", r"unknown field `tenants`; .* only tables \[tenant\.NAME\]"),
        ("[tenant.a]\ntoken = 'short'", "tenant.a.token: a token needs at least 16 characters"),
        ("[tenant.a]", "tenant.a.token"),
        ("[tenant.a]\ntoken = './none'", "tenant.a.token: cannot read"),
        (f"[tenant.a]\ntoken = '{ALICE}'\nshare = 0", r"tenant\.a\.share: Expected `float` > 0.0$"),
        (
            f"[tenant.a]\ntoken = '{ALICE}'\nshares = 2",
            r"tenant\.a: unknown field `shares`; the known ones are: token, share, priority",
        ),
        (f"[tenant.a]\ntoken = '{ALICE}'\nrole = 'root'", r"tenant\.a\.role: Invalid enum value 'root'$"),
        (f"[tenant.a]\ntoken = '{ALICE}'\nmemory = 'much'", "tenant.a"),
        (f"[tenant.a]\ntoken = '{ALICE}'\n[tenant.b]\ntoken = '{ALICE}'", "a and b have the same token"),
        (f"[tenant.'a b']\ntoken = '{ALICE}'", "invalid tenant name 'a b'"),
        (f"[tenant.default]\ntoken = '{ALICE}'", "remove its token: this tenant uses that of the cluster"),
        ("tenant = [", "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_without_a_token(tmp_path, text, says):
    with pytest.raises(SettingsError, match=says) as raised:
        read_tenants(written(tmp_path, text))
    assert "tenants.toml" in str(raised.value)
    assert ALICE not in str(raised.value)


def test_a_token_says_whose_it_is(tmp_path):
    file = written(tmp_path, f"[tenant.alice]\ntoken = '{ALICE}'\n[tenant.bob]\ntoken = '{BOB}'")
    tokens = Tokens(digest("cluster"), digest("hosts"), lambda: read_tenants(file))
    assert [tokens.tenant_of(digest(token)) for token in (ALICE, BOB, "cluster")] == ["alice", "bob", "default"]
    for token in ("", "hosts", ALICE + "x", token_hash(ALICE)):
        assert tokens.tenant_of(digest(token)) is None, "nor is the hash of a token any"
    for role in ("worker", "agent", "engine"):
        assert tokens.are_right(role, digest("hosts"))
        assert not any(tokens.are_right(role, digest(token)) for token in (ALICE, BOB, "cluster", ""))


def test_without_tenants_there_is_one():
    assert Tokens().tenant_of("") == Tokens().tenant_of("anything") == "default"
    assert (Tokens("secret").tenant_of("secret"), Tokens("secret").tenant_of("")) == ("default", None)


def test_with_tenants_nobody_gets_in_without_a_token(tmp_path):
    file = written(tmp_path, f"[tenant.alice]\ntoken = '{ALICE}'")
    assert Tokens("", "", lambda: read_tenants(file)).tenant_of("") is None


def test_directories_are_granted_to_a_tenant_by_their_paths(tmp_path):
    text = f"""
    [tenant.alice]
    token = "{ALICE}"
    read = ["/data/sets"]
    write = ["/data/checkpoints", "/scratch/alice"]
    """
    _, alice = read_tenants(written(tmp_path, text))
    assert (alice.read, alice.write) == (("/data/sets",), ("/data/checkpoints", "/scratch/alice"))


@pytest.mark.parametrize("path", ["data", "/", "/data/", "/data/../root", "/proc/1", "/sys", "/dev/shm"])
def test_what_is_no_directory_of_data_is_not_granted(tmp_path, path):
    text = f"""
    [tenant.alice]
    token = "{ALICE}"
    read = ["{path}"]
    """
    with pytest.raises(SettingsError, match=r"tenant\.alice: '/?.*' (is not an absolute path|cannot be granted)"):
        read_tenants(written(tmp_path, text))


def test_each_limit_has_a_text_for_one_several_and_none():
    numbers = {each.name for each in msgspec.structs.fields(TenantSettings) if type(each.default) is int}
    assert LIMIT_TEXTS.keys() == numbers - {"priority"}
    assert [limit_text("memory", value) for value in (0, 256 << 20)] == ["no limit of memory", "256.0 MiB per device"]
    assert [limit_text("launches", value) for value in (1, 2)] == ["1 launch", "2 launches"]
    assert [limit_text("reserve", value) for value in (0, 10)] == ["no reserve", "reserve 10 %"]
