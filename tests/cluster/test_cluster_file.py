"""Tests of cluster files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from atoll.cluster.cluster_file import read_cluster_file, settings_from_environment
from atoll.cluster.settings import ClusterSettings, OnOff
from atoll.cluster.topology import IslandShape
from atoll.errors import SettingsError

WHOLE = """
platform = "cuda"
device_memory = "80GiB"
lease = 5
wait = 60
engine = "hosts"
bulk_tls = "off"
insecure_sandbox = true
delegate_after = "never"
max_sessions = 7
python_read = ["/data"]

[[island]]
count = 2
hosts = 2
devices = 4
topology = "2x4"
kind = "h100"

[[island]]
devices = 3
platform = "cpu"
"""


def read(directory: Path, content: str, **flags: object) -> ClusterSettings:
    file = directory / "cluster.toml"
    file.write_text(content)
    return read_cluster_file(file, ClusterSettings(), flags)


def test_a_file_says_which_islands_there_are_and_the_settings(tmp_path: Path) -> None:
    settings = read(tmp_path, WHOLE)
    large = IslandShape(2, 4, "cuda", (2, 4), "h100")
    assert settings.topology.shapes == (large, large, IslandShape(1, 3, "cpu"))
    assert settings.islands == "2x2x4+1x1x3"
    chosen = (settings.device_memory, settings.lease_seconds, settings.wait_seconds, settings.engine, settings.bulk_tls)
    assert chosen == (80 << 30, 5.0, 60.0, "hosts", OnOff.OFF)
    assert (settings.insecure_sandbox, settings.delegate_after_seconds, settings.max_sessions) == (True, None, 7)
    assert settings.python_read == ("/data",)


def test_flags_count_more_than_the_file_and_the_file_more_than_the_rest(tmp_path: Path) -> None:
    settings = read(tmp_path, WHOLE, lease_seconds=7.0, platform="rocm")
    assert (settings.lease_seconds, settings.wait_seconds) == (7.0, 60.0)
    assert settings.topology.platforms == ("rocm", "cpu")


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text("[[island]]\ndevices = 2\n")
    monkeypatch.setenv("ATOLL_CLUSTER", str(tmp_path / "c.toml"))
    monkeypatch.setenv("ATOLL_POLICY", "fair")
    settings = settings_from_environment()
    assert (settings.islands, settings.policy) == ("1x1x2", "fair")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "missing required field `island`"),
        ("island = []", "island: Expected `array` of length >= 1"),
        ("[[island]]\nhosts = 2", r"island\[0\]: Object missing required field `devices`"),
        ("[[island]]\ndevices = 0", r"island\[0\].devices: Expected `int` >= 1"),
        ("[[island]]\ndevices = 2\nhosts = '2'", r"island\[0\].hosts: Expected `int`, got `str`"),
        (
            "[[island]]\ndevices = 2\n\n[[island]]\ndevices = 2\nhost = 1",
            r"island\[1\]: Object contains unknown field `host`; the known ones are: devices, hosts, count, platform",
        ),
        ("islands = 2\n[[island]]\ndevices = 2", "unknown field `islands`; the known ones are: island, platform"),
        ("[[island]]\ndevices = 6\ntopology = '2x2'", r"island\[0\].topology: .*cannot form a mesh of 2x2"),
        ("[[island]]\ndevices = 6\ntopology = '2*3'", r"island\[0\].topology: .*invalid device mesh"),
        ("lease = -1\n[[island]]\ndevices = 2", "lease is '-1': expected a number of seconds, 3 or more"),
        ("lease = '5'\n[[island]]\ndevices = 2", "lease is '5': expected a number"),
        ("device_memory = 'much'\n[[island]]\ndevices = 2", "device_memory is 'much': expected an amount of memory"),
        ("dispatch = 'now'\n[[island]]\ndevices = 2", "dispatch is 'now': expected parallel or sequential"),
        ("[[island]]\ndevices = 2\ncount = 40000\n[[island]]\ndevices = 2\ncount = 40000", "65536 islands, not 80000"),
        ("[[island]\n", r"not valid TOML: .*line 1"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(tmp_path: Path, content: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"cluster.toml.*{text}"):
        read(tmp_path, content)


def test_the_example_of_the_documentation_is_a_cluster() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "operate" / "clusters.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    assert "[[island]]" in example
    with TemporaryDirectory() as directory:
        assert read(Path(directory), example).islands == "2x4x8+1x1x4+1x2x2"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"cannot read the cluster file {tmp_path}/no: No such file"):
        read_cluster_file(tmp_path / "no", ClusterSettings())
