"""Tests of reading a cluster's settings from the environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import atoll
from atoll.cluster.settings import (
    SETTINGS,
    ClusterSettings,
    Dispatch,
    OnOff,
    SuspendLower,
    default_text,
    environment_of,
)
from atoll.errors import ClusterError, SettingsError

SOURCES = Path(atoll.__file__).parent
VARIABLES = [setting.variable for setting in SETTINGS.values()]


@pytest.fixture(autouse=True)
def _environment_has_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ClusterSettings()),
        (dict.fromkeys(VARIABLES, ""), ClusterSettings()),
        ({"ATOLL_ISLANDS": "2x1x4"}, ClusterSettings(islands="2x1x4")),
        ({"ATOLL_PLATFORM": "cuda"}, ClusterSettings(platform="cuda")),
        ({"ATOLL_DEVICE_MEMORY": "16GiB"}, ClusterSettings(device_memory=16 << 30)),
        ({"ATOLL_TOPOLOGY": "2x4"}, ClusterSettings(mesh="2x4")),
        ({"ATOLL_POLICY": "lifo"}, ClusterSettings(policy="lifo")),
        ({"ATOLL_DISPATCH": "sequential"}, ClusterSettings(dispatch=Dispatch.SEQUENTIAL)),
        ({"ATOLL_LEASE": "5.5"}, ClusterSettings(lease_seconds=5.5)),
        ({"ATOLL_WAIT": "0"}, ClusterSettings(wait_seconds=0.0)),
        ({"ATOLL_RELAY_GROUP": "0"}, ClusterSettings(relay_group=0)),
        ({"ATOLL_MAX_SESSIONS": "3"}, ClusterSettings(max_sessions=3)),
        ({"ATOLL_ABANDONED": "7"}, ClusterSettings(abandoned_seconds=7.0)),
        ({"ATOLL_DELEGATE_AFTER": "2"}, ClusterSettings(delegate_after_seconds=2.0)),
        ({"ATOLL_DELEGATE_AFTER": "never"}, ClusterSettings(delegate_after_seconds=None)),
        ({"ATOLL_PYTHON_READ": "/a:/b"}, ClusterSettings(python_read=("/a", "/b"))),
        ({"ATOLL_INSECURE_SANDBOX": "1"}, ClusterSettings(insecure_sandbox=True)),
    ],
)
def test_variables_set_settings(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: ClusterSettings
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert ClusterSettings.from_environment() == expected


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("ATOLL_ISLANDS", "2x2", "expected ISLANDSxHOSTSxDEVICES"),
        ("ATOLL_DEVICE_MEMORY", "much", "expected an amount of memory, such as 16GiB"),
        ("ATOLL_DISPATCH", "serial", "expected parallel or sequential"),
        ("ATOLL_LEASE", "1", "expected a number of seconds, 3 or more"),
        ("ATOLL_WAIT", "soon", "expected a number of seconds"),
        ("ATOLL_WAIT", "inf", "expected a number of seconds"),
        ("ATOLL_WAIT", "-1", "expected a number of seconds"),
        ("ATOLL_MAX_SESSIONS", "0", "expected a number, 1 or more"),
        ("ATOLL_RELAY_GROUP", "1", "expected a number of hosts, 2 or more, or 0"),
        ("ATOLL_JOINT_ISLANDS", "1", "expected a number of islands, 2 or more, or 0"),
        ("ATOLL_DELEGATE_AFTER", "later", "expected a number of seconds"),
        ("ATOLL_BULK_TLS", "yes", "expected on or off"),
        ("ATOLL_PYTHON_READ", "/a:b", "'b' is not an absolute path"),
        ("ATOLL_INSECURE_SANDBOX", "yes", "expected 1 or 0"),
    ],
)
def test_an_error_names_the_variable_its_value_and_the_expected_form(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ClusterError, match=f"{variable} is '{value}': {error}"):
        ClusterSettings.from_environment()


def test_every_setting_has_a_variable_and_a_key() -> None:
    """Tenants have a separate file, shapes come from a cluster file, and Atoll's version determines `decisions`."""
    assert set(ClusterSettings.__struct_fields__) - set(SETTINGS) == {"tenants", "shapes", "decisions"}
    assert [name for name, setting in SETTINGS.items() if not setting.key] == ["islands"]
    for names in (VARIABLES, [setting.name for setting in SETTINGS.values()]):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_default_is_a_valid_value_and_survives_as_text(name: str) -> None:
    setting, default = SETTINGS[name], getattr(ClusterSettings(), name)
    assert setting.form.text(default) == "" or setting.parse(setting.form.text(default), "") == default


def test_settings_reach_a_child_process_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "islands": "1x1x2",
        "device_memory": 1024,
        "dispatch": Dispatch.SEQUENTIAL,
        "bulk_tls": OnOff.OFF,
        "lease_seconds": 3.25,
        "delegate_after_seconds": None,
        "suspend_lower": SuspendLower.DISK,
        "python_read": ("/data", "/sets"),
        "insecure_sandbox": True,
    }
    for variable, value in environment_of(given).items():
        monkeypatch.setenv(variable, value)
    assert ClusterSettings.from_environment() == ClusterSettings(**given)


@pytest.mark.parametrize(
    ("name", "text"),
    [("lease_seconds", "10"), ("mesh", "a line"), ("bulk_tls", "on"), ("ray_labels", ""), ("insecure_sandbox", "")],
)
def test_help_and_reference_say_what_applies_if_a_setting_is_not_given(name: str, text: str) -> None:
    assert default_text(name) == text


def test_a_list_in_a_file_may_contain_the_separator_of_the_variable() -> None:
    setting = SETTINGS["python_read"]
    assert setting.from_key(["/a:b"], "file") == ("/a:b",)
    with pytest.raises(SettingsError, match="file contains 1: expected a list of strings"):
        setting.from_key([1], "file")


def test_each_setting_is_read_by_some_code() -> None:
    """The test searches for attributes of any object, so that an unread field with the same name as another one may
    pass.
    """
    text = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    read = set(re.findall(r"\.(\w+)", text))
    assert set(SETTINGS) - read == set()
