"""Tests of the cache of compiled programs on a cluster with tenants, if another user writes to its directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster


def tenant(name: str) -> TenantSettings:
    return TenantSettings(name, token_hash(f"the token of {name}"))


def bens() -> list[int]:
    import jax
    import numpy as np

    return np.asarray(jax.jit(lambda x: x * 2)(np.arange(4, dtype=np.int32))).tolist()


def anas() -> list[int]:
    import jax
    import numpy as np

    return np.asarray(jax.jit(lambda x: x * 666)(np.arange(4, dtype=np.int32))).tolist()


def files_of(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("-atime")}


def test_a_program_that_is_copied_over_another_tenants_does_not_run(
    start_cluster: StartCluster, start_python: StartPython, tmp_path: Path
) -> None:
    def start() -> StandingCluster:
        return start_cluster(
            {"ATOLL_CACHE_DIR": str(tmp_path), "ATOLL_KEY_FILE": str(tmp_path.parent / "key")},
            islands="1x1x1",
            token="the token of the cluster",
            tenants=(tenant("ana"), tenant("ben")),
        )

    def run(cluster: StandingCluster, name: str) -> list[int]:
        python = start_python(ATOLL_ADDRESS=cluster.address, ATOLL_TOKEN=f"the token of {name}")
        result: list[int] = python.call(anas if name == "ana" else bens)
        python.close()
        return result

    cluster = start()
    before = files_of(tmp_path)
    assert run(cluster, "ben") == [0, 2, 4, 6]
    bens_files = files_of(tmp_path) - before
    assert run(cluster, "ana") == [0, 666, 1332, 1998]
    anas_files = files_of(tmp_path) - before - bens_files
    cluster.stop()

    cluster = start()
    assert run(cluster, "ben") == [0, 2, 4, 6]
    functions = cluster.report()["functions"]
    assert functions["compiled"] == 0, "the cache outlives the cluster"
    assert functions["cached"] == 1
    cluster.stop()

    (evil,), (good,) = anas_files, bens_files
    shutil.copyfile(evil, good)
    cluster = start()
    assert run(cluster, "ben") == [0, 2, 4, 6]
    assert run(cluster, "ana") == [0, 666, 1332, 1998]
    messages = cluster.messages()
    assert messages.count("which this cache has not written") == 1, messages
    cluster.stop()
