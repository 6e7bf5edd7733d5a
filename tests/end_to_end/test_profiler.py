"""Tests of `jax.profiler` in a script: hosts' profiles are saved in its log directory, without other sessions'
programs.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.script_process import StartScript
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster


@pytest.fixture(scope="module")
def shared(start_cluster: StartCluster) -> StandingCluster:
    return start_cluster(islands="2x1x1")


@pytest.fixture(scope="module")
def alice(shared: StandingCluster, start_python: StartPython) -> RemotePython:
    return start_python(ATOLL_ADDRESS=shared.address)


@pytest.fixture(scope="module")
def bob(shared: StandingCluster, start_python: StartPython) -> RemotePython:
    return start_python(ATOLL_ADDRESS=shared.address)


def computed(name: str, times: int = 3) -> None:
    """Run a program with this name on all devices."""

    def work(x: Any) -> Any:
        return jnp.tanh(x @ x)

    work.__name__ = name
    for device in jax.devices():
        x = jax.device_put(jnp.ones((64, 64)), device)
        for _ in range(times):
            x = jax.jit(work)(x)
        x.block_until_ready()


def traced(directory: str, name: str) -> None:
    computed(name)  # compiled
    with warnings.catch_warnings(), jax.profiler.trace(directory):
        warnings.simplefilter("error")  # for example that the profile of host 1 is missing
        computed(name)


def started(directory: str) -> None:
    jax.profiler.start_trace(directory)


def stopped() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.profiler.stop_trace()


def warnings_of_the_end() -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.profiler.stop_trace()
    return "\n".join(str(each.message) for each in caught)


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the XPlane files of the only run in the directory."""
    (run,) = (directory / "plugins" / "profile").iterdir()
    return {path.name: path.read_bytes() for path in run.iterdir() if path.name.endswith(".xplane.pb")}


def events_of(content: bytes) -> set[str]:
    return {
        event.name
        for plane in ProfileData.from_serialized_xspace(content).planes
        for line in plane.lines
        for event in line.events
    }


def test_a_script_gets_one_file_of_each_host_beside_its_own(alice: RemotePython, tmp_path: Path) -> None:
    alice.call(traced, str(tmp_path), "step_of_alice")
    files = files_of(tmp_path)
    assert {"host_0.xplane.pb", "host_1.xplane.pb"} < set(files)
    assert len(files) == 3
    for host in (0, 1):
        content = files[f"host_{host}.xplane.pb"]
        events = events_of(content)
        assert any("tanh" in name for name in events), events
        assert b"jit_step_of_alice" in content


def test_another_sessions_programs_have_no_names_in_a_profile(
    alice: RemotePython, bob: RemotePython, tmp_path: Path
) -> None:
    alice.call(started, str(tmp_path))
    bob.call(computed, "recipe_of_bob")
    alice.call(computed, "step_of_alice")
    alice.call(stopped)
    for host in (0, 1):
        content = files_of(tmp_path)[f"host_{host}.xplane.pb"]
        assert b"recipe_of_bob" not in content
        assert b"jit_step_of_alice" in content


def test_a_second_session_is_refused_and_the_first_goes_on(
    alice: RemotePython, bob: RemotePython, tmp_path: Path
) -> None:
    alice.call(started, str(tmp_path / "alice"))
    with pytest.raises(RemoteError, match="has been recording a profile of another session"):
        bob.call(started, str(tmp_path / "bob"))
    alice.call(stopped)
    assert len(files_of(tmp_path / "alice")) == 3
    bob.call(traced, str(tmp_path / "bob"), "after_alice")
    assert len(files_of(tmp_path / "bob")) == 3


def test_a_profile_ends_with_the_script_that_forgot_it(
    shared: StandingCluster, start_script: StartScript, alice: RemotePython, tmp_path: Path
) -> None:
    script = start_script(
        "import jax; jax.profiler.start_trace('/tmp/never-written'); import os; os._exit(0)",
        ATOLL_ADDRESS=shared.address,
    )
    script.process.wait(300)
    shared.until(lambda report: len(report["sessions"]) == 2, 20)
    alice.call(traced, str(tmp_path), "after_a_script")
    assert len(files_of(tmp_path)) == 3


def test_a_lost_host_costs_its_own_profile_alone(shared: StandingCluster, alice: RemotePython, tmp_path: Path) -> None:
    alice.call(started, str(tmp_path))
    shared.worker(1).kill()
    assert "the profile of host 1 is missing" in alice.call(warnings_of_the_end)
    assert {name for name in files_of(tmp_path) if name.startswith("host_")} == {"host_0.xplane.pb"}


@pytest.mark.thorough
def test_on_one_host_its_profile_is_in_the_scripts_own_file(start_python: StartPython, tmp_path: Path) -> None:
    start_python(ATOLL_ISLANDS="1x1x2").call(traced, str(tmp_path), "step_on_one_host")
    ((name, content),) = files_of(tmp_path).items()
    assert not name.startswith("host_")
    planes = [plane.name for plane in ProfileData.from_serialized_xspace(content).planes]
    assert planes.count("/host:CPU") == 1
    assert "/device:CUSTOM:host_0" in planes
    assert any("tanh" in event for event in events_of(content))
    assert b"jit_step_on_one_host" in content


def test_null_devices_have_no_profile(start_script: StartScript, tmp_path: Path) -> None:
    script = start_script(
        f"import jax; jax.profiler.start_trace({str(tmp_path)!r})", ATOLL_PLATFORM="null", JAX_TRACEBACK_FILTERING="off"
    )
    script.process.wait(300)
    assert "UNIMPLEMENTED: null devices compute nothing" in script.errors()
