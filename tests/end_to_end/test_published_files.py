"""Tests of published arrays in files, which outlive their island and their cluster, on a real cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.operate.operator_requests import request_check, request_operation
from atoll.protocol.messages import RemoveArraysRequest
from atoll.wire.address import parse_address
from tests.end_to_end.arrays_on_disk import (
    error_of_read,
    fill,
    publish,
    publish_large,
    read,
    read_large,
    wait_until_stored,
)
from tests.end_to_end.consecutive_clusters import ConsecutiveClusters
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StartCluster

SECONDS = 60.0


class Clusters(ConsecutiveClusters):
    def has_no_files(self) -> bool:
        return not self.files.exists() or not any(self.files.iterdir())

    def until(self, version: int, files: str) -> None:
        """Wait until the files of a version are in this state."""

        def is_so(report: dict[str, Any]) -> bool:
            return [each["files"] for each in report["versions"] if each["version"] == version] == [files]

        self.now.until(is_so, SECONDS)


@pytest.fixture
def clusters(
    tmp_path_factory: pytest.TempPathFactory, module_directory: Path, program_cache: Path
) -> Iterator[Clusters]:
    made = Clusters(module_directory / tmp_path_factory.mktemp("c").name, program_cache)
    yield made
    made.now.stop()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_version_outlives_its_island_and_its_killed_cluster(clusters: Clusters, start_python: StartPython) -> None:
    trainer = start_python(ATOLL_ADDRESS=clusters.now.address)
    version = trainer.call(publish, 0, 7.0)
    trainer.call(wait_until_stored, version)
    trainer.close()
    clusters.now.worker(0).kill()
    clusters.until(version, "stored")
    reader = start_python(ATOLL_ADDRESS=clusters.now.address)
    assert reader.call(read, version) == {7.0}
    reader.close()
    clusters.until(version, "written")
    clusters.now.kill()
    clusters.start_next()
    clusters.until(version, "stored")
    reader = start_python(ATOLL_ADDRESS=clusters.now.address)
    assert reader.call(read, version) == {7.0}
    assert reader.call(publish, 0, 8.0) == version + 1
    clusters.until(version + 1, "written")
    check = request_check(parse_address(clusters.now.address), "")
    assert [*check.contradictions, *check.differences] == []
    address = parse_address(clusters.now.address)
    request_operation(address, "", RemoveArraysRequest("policy", -1))
    clusters.now.until(lambda report: not report["versions"], SECONDS)
    clusters.now.until(lambda report: clusters.has_no_files(), SECONDS)
    reader.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_changed_file_is_an_error_that_names_it(clusters: Clusters, start_python: StartPython) -> None:
    trainer = start_python(ATOLL_ADDRESS=clusters.now.address)
    version = trainer.call(publish, 0, 7.0)
    clusters.until(version, "written")
    trainer.close()
    clusters.now.kill()
    path = max(clusters.files.rglob("*.piece"), key=lambda each: each.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    clusters.start_next()
    reader = start_python(ATOLL_ADDRESS=clusters.now.address)
    assert f"{path} is not what was spilled there" in reader.call(error_of_read, version)
    reader.close()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_a_cluster_that_is_killed_while_it_writes_leaves_nothing(
    clusters: Clusters, start_python: StartPython, seconds: float
) -> None:
    trainer = start_python(ATOLL_ADDRESS=clusters.now.address)
    trainer.call(publish_large, 8, 32)
    time.sleep(seconds)
    clusters.now.kill()
    clusters.start_next()
    address = parse_address(clusters.now.address)
    versions = clusters.now.report()["versions"]
    assert [each["files"] for each in versions] in ([], ["stored"])
    if versions:
        request_operation(address, "", RemoveArraysRequest("large", -1))
    clusters.now.until(lambda report: clusters.has_no_files(), SECONDS)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_version_makes_room_and_comes_back(start_cluster: StartCluster, start_python: StartPython) -> None:
    cluster = start_cluster(islands="1x1x1", device_memory=100 << 20)
    trainer = start_python(ATOLL_ADDRESS=cluster.address)
    trainer.call(publish_large, 1, 32)

    def until(files: str) -> None:
        cluster.until(lambda report: [each["files"] for each in report["versions"]] == [files], SECONDS)

    until("written")
    trainer.close()
    other = start_python(ATOLL_ADDRESS=cluster.address)
    assert other.call(fill, 80) == 80 << 18
    until("stored")
    assert other.call(read_large, 0) == 0.0
    until("written")
    other.close()
