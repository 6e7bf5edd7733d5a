"""Tests of Atoll as a plug-in of JAX: it does not affect scripts that do not request it, and works without warnings
otherwise.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from jax._src import xla_bridge

from atoll.client.backend import add_platform
from tests.forked_process import with_forked_children
from tests.scripts import RunScript

# Used before the imports of a process, and after its end.
EXECUTED: dict[str, str | None] = {"ATOLL_TEST_EXECUTED": "1"}


def test_a_script_that_does_not_ask_for_atoll_imports_and_starts_nothing(run_script: RunScript) -> None:
    result = run_script(
        """
        import json, sys
        import jax
        import psutil

        platforms = [device.platform for device in jax.devices()]
        modules = sorted(name for name in sys.modules if name.split(".")[0] == "atoll")
        print(json.dumps([platforms, modules, len(psutil.Process().children())]))
        """,
        env={"JAX_PLATFORMS": None, **EXECUTED},
    ).check()
    platforms, modules, children = json.loads(result.stdout)
    assert platforms == ["cpu"]
    assert modules == ["atoll", "atoll.client", "atoll.client.plugin"]
    assert children == 0
    assert result.stderr == ""


def test_the_error_of_a_script_that_names_atoll_too_late_says_what_to_set(run_script: RunScript) -> None:
    result = run_script(
        """
        import jax

        try:
            jax.devices("atoll")
        except RuntimeError as error:
            print(error)
        """,
        env={"JAX_PLATFORMS": None},
    ).check()
    assert "JAX_PLATFORMS=atoll" in result.stdout


def test_importing_atoll_imports_no_jax(run_script: RunScript) -> None:
    result = run_script(
        """
        import sys
        import atoll

        assert callable(atoll.connect) and atoll.errors.AtollError and atoll.__version__
        assert sorted(atoll.__all__) == sorted(set(dir(atoll)) & set(atoll.__all__))
        print("jax" in sys.modules)
        """,
        env=EXECUTED,
    ).check()
    assert result.stdout == "False\n"


def test_the_local_cpu_is_there_beside_atoll(run_script: RunScript) -> None:
    result = run_script(
        """
        import jax, jax.numpy as jnp

        here, there = jax.local_devices(backend="cpu"), jax.devices("atoll")
        assert jax.devices() == there and jax.default_backend() == "cpu", jax.default_backend()
        print(len(here), len(there), here[0].client is there[0].client)
        with jax.default_device(here[0]):
            local = jnp.arange(3) + 1
        print(local.devices() == {here[0]}, (jax.device_put(local, there[1]) * 2).tolist())
        """,
        env={"JAX_PLATFORMS": "atoll,cpu"},
    ).check()
    assert result.stdout == "1 4 False\nTrue [2, 4, 6]\n"


def test_devices_are_described_as_jax_and_its_libraries_expect(run_script: RunScript) -> None:
    result = run_script(
        """
        import json
        import jax

        devices = jax.devices()
        print(json.dumps({
            "ids": [d.id for d in devices],
            "slices": [d.slice_index for d in devices],
            "coords": [tuple(d.coords) for d in devices],
            "processes": [d.process_index for d in devices],
            "platforms": [d.platform for d in devices],
            "kinds": [d.device_kind for d in devices],
            "memories": [[m.kind for m in d.addressable_memories()] for d in devices],
            "all local": devices == jax.local_devices(),
            "counts": [jax.process_count(), jax.process_index(), jax.device_count(), jax.local_device_count()],
        }))
        """,
        islands="2x1x2",
    ).check()
    printed = json.loads(result.stdout)
    assert printed["ids"] == [0, 1, 2, 3]
    assert printed["slices"] == [0, 0, 1, 1]
    assert printed["coords"] == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert printed["processes"] == [0] * 4
    assert printed["platforms"] == printed["kinds"] == ["cpu"] * 4
    assert all(kinds == ["device", "pinned_host", "unpinned_host"] for kinds in printed["memories"])
    assert printed["all local"]
    assert printed["counts"] == [1, 0, 4, 4]


def test_a_run_writes_nothing_of_its_own_and_warns_of_nothing(run_script: RunScript) -> None:
    result = run_script(
        """
        import warnings
        warnings.simplefilter("error")
        import jax, jax.numpy as jnp
        import numpy as np

        x = jax.device_put(np.ones((512, 512), np.float32), jax.devices()[1])
        print(float(jax.jit(jax.grad(lambda a: (a @ a).sum()))(x).sum()))
        """,
        env={"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"},
    ).check()
    assert result.stdout == f"{512 * 512 * 1024.0}\n"
    assert result.stderr == ""


def test_of_a_script_that_fails_only_its_own_traceback_is_shown(run_script: RunScript) -> None:
    forks = with_forked_children({"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    result = run_script(
        """
        import jax.numpy as jnp

        x = jnp.arange(4) + 1
        raise ValueError(f"the sum is {int(x.sum())}")
        """,
        env={**forks, "ATOLL_TEST_EXECUTED": "script.py"},
    )
    assert result.returncode == 1
    first, *_, last = result.stderr.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: the sum is 10")
    assert len(result.stderr.splitlines()) <= 4


def test_the_users_cache_directory_is_used_by_the_workers(run_script: RunScript, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    result = run_script(
        """
        import jax, jax.numpy as jnp

        print(jax.jit(lambda x: x * 2 + 1)(jnp.arange(3)).tolist(), jax.config.jax_compilation_cache_dir)
        """,
        env={
            "ATOLL_CACHE_DIR": None,
            "JAX_COMPILATION_CACHE_DIR": str(directory),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "HOME": str(tmp_path / "home"),
            "XDG_CACHE_HOME": None,
        },
    ).check()
    assert result.stdout == f"[1, 3, 5] {directory}\n"
    assert result.stderr == ""
    assert any(path.name.startswith("jit__lambda-") for path in directory.iterdir())
    assert not (tmp_path / "home").exists()


def test_jax_keeps_its_own_cache_after_a_cluster_of_a_block(run_script: RunScript, tmp_path: Path) -> None:
    result = run_script(
        """
        import jax, jax.numpy as jnp
        import atoll

        before = jax.config.jax_enable_compilation_cache
        with atoll.connect(islands="1x1x2") as devices:
            print(len(devices), float(jnp.ones(3).sum()), before, jax.config.jax_enable_compilation_cache)
        print(jax.config.jax_enable_compilation_cache, float(jnp.ones(3).sum()), jax.devices()[0].platform)
        """,
        env={"JAX_PLATFORMS": "cpu"},
    ).check()
    assert result.stdout == "2 3.0 True True\nTrue 3.0 cpu\n"
    assert result.stderr == ""


@pytest.mark.thorough
def test_a_program_runs_on_one_cluster_after_another(run_script: RunScript) -> None:
    result = run_script(
        """
        import jax.numpy as jnp, numpy as np
        import atoll

        program = atoll.program(lambda x: x * 2 + jnp.arange(3))
        nodes = lambda: [each.launch is not None for each in program._cache.values()]
        print(program(np.ones(3)).sum(), nodes())
        for _ in range(2):
            with atoll.connect(islands="1x1x2"):
                print(program(np.ones(3)).sum(), program(np.ones(3)).sum(), nodes())
        print(program(np.ones(3)).sum(), nodes())
        """,
        env={"JAX_PLATFORMS": "cpu"},
    ).check()
    assert result.stdout.splitlines() == ["9.0 [False]", "9.0 9.0 [True]", "9.0 9.0 [True]", "9.0 [False]"]
    assert result.stderr == ""


class Client:
    """Client of a cluster with GPUs."""

    platform, _raw_platform = "gpu", "cuda"


def test_devices_of_another_platform_are_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    monkeypatch.setattr(xla_bridge, "_backends", {"atoll": client})
    add_platform(client)
    assert xla_bridge.canonicalize_platform("gpu") == "cuda"
    assert xla_bridge.backends()["cuda"] is client


def test_a_script_that_logs_has_no_lines_of_jax_about_atoll(run_script: RunScript) -> None:
    script = """
        import logging

        logging.basicConfig(level=logging.INFO)
        import jax, jax.numpy as jnp

        print(jax.jit(lambda x: x * 2 + 1)(jnp.arange(3)))
        """
    result = run_script(script).check()
    assert result.stdout == "[1 3 5]\n"
    assert result.stderr == ""
