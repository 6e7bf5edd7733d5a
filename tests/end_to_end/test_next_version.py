"""Tests that a running cluster continues with the next version of Atoll, which stores and sends more than this one, and
that this version can replace the next one again if the two store compatible structs.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll
from atoll.operate.operator_requests import request_check
from atoll.protocol import messages as m
from atoll.wire.address import parse_address
from tests.end_to_end.arrays_on_disk import publish_numbers, read_numbers
from tests.end_to_end.remote_python import ROOT, RemoteError, StartPython
from tests.end_to_end.standing_cluster import StandingCluster
from tests.end_to_end.test_detached_runs import attach, begin, step_on
from tests.end_to_end.test_suspending import ask, session_of, steps_at, until_step
from tests.forked_process import EXECUTED
from tests.scripts import script_environment

SECONDS = 300.0
STEPS = 200  # of the detached run
SCRIPT = """
import atoll, jax
print(atoll.__version__, jax.numpy.arange(8).sum(), [each.slice_index for each in jax.devices()])
"""
NEXT = "99.0"
# The next version has one more field, with a default, in these dataclasses, their stored structs, and messages.
# Workers send `Compiled` and receive `Run`, and the journal stores `Launch`. Each snapshot has the struct of the
# history. A snapshot has structs of sessions and gangs if there were some when it was written.
FIELDS = {
    "state/session.py": ["Session"],
    "state/queued_nodes.py": ["Gang"],
    "state/state_dumps.py": ["SessionDump", "GangDump"],
    "telemetry/telemetry_dumps.py": ["HistoryDump"],
    "protocol/messages/proxy_messages.py": ["Launch"],
    "protocol/messages/worker_messages.py": ["Compiled", "Run"],
}
FIELD = "generation: int = 7"


def replace_once(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{path}: {pattern}"
    path.write_text(text)


def add_field(path: Path, name: str, version: str) -> None:
    """Add a field at the end of a class. If it is a stored struct, replace its version."""
    lines = path.read_text().splitlines()
    (found,) = (
        each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef) and each.name == name
    )
    last = max(each.end_lineno or 0 for each in found.body if isinstance(each, ast.AnnAssign))
    lines.insert(last, f"    {FIELD}")
    for call in found.decorator_list:
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg == "version":
                value = keyword.value
                line = lines[value.lineno - 1]
                lines[value.lineno - 1] = f"{line[: value.col_offset]}{version}{line[value.end_col_offset :]}"
    path.write_text("\n".join(lines) + "\n")


class Cluster:
    """A cluster with a journal. Its next processes have the installed version if they are executed.

    `executed` is a part of the names of the modules that are executed, or "1" for all: see `tests.forked_process`.
    """

    def __init__(self, directory: Path, program_cache: Path, executed: str, islands: str) -> None:
        self._islands = islands
        directory.mkdir(mode=0o700)
        self.files = directory / "files"
        self._directory = directory
        self._installed = directory / "installed"
        self._installed.mkdir()
        self._environment = script_environment(directory, program_cache) | {
            "PYTHONPATH": f"{self._installed}:{ROOT / 'src'}:{ROOT}",
            EXECUTED: executed,
        }
        self.now = self.start()

    def start(self) -> StandingCluster:
        """Start the cluster as `atoll up` does. Fail with the reason if it does not start."""
        shutil.rmtree(self._directory / "cluster", ignore_errors=True)
        self.now = StandingCluster(
            self._directory,
            self._environment,
            islands=self._islands,
            suspend_directory=str(self.files),
            journal=str(self._directory / "journal"),
            grace_seconds=SECONDS,
        )
        return self.now

    def install_next(self, versions: str = "98") -> None:
        """Install the next version, with these `versions` of the struct of the history."""
        self.install_this()
        shutil.copytree(Path(atoll.__file__).parent, self._installed / "atoll")
        installed = self._installed / "atoll"
        replace_once(installed / "_version.py", r"^__version__ = .*$", f'__version__ = "{NEXT}"')
        replace_once(
            installed / "telemetry" / "history.py", r"^        self\._next = 1$", r"\g<0>\n        self.generation = 7"
        )
        for path, names in FIELDS.items():
            for name in names:
                add_field(installed / path, name, versions if name == "HistoryDump" else "98")

    def install_this(self) -> None:
        shutil.rmtree(self._installed / "atoll", ignore_errors=True)

    def kill_controller(self) -> None:
        (controller,) = [each for name, each in self.now.processes().items() if "controller_main" in name]
        controller.kill()

    def replace(self, version: str) -> None:
        """Kill the controller, and wait until one of this version has continued."""
        self.kill_controller()
        self.now.until(lambda report: report["version"] == version, SECONDS)

    def run(self, code: str) -> str:
        """Run a script with the installed version, and return its output."""
        command = [sys.executable, "-c", code]
        environment = self._environment | {"ATOLL_ADDRESS": self.now.address}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def journal(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self._directory / "journal").iterdir() if path.is_file()}


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
    module_directory: Path,
    program_cache: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Cluster]:
    made = Cluster(module_directory / tmp_path_factory.mktemp("c").name, program_cache, *request.param)
    yield made
    made.now.stop()


class Scripts:
    """A script that trains, one that is suspended on disk, and a detached run, which has published its state."""

    def __init__(self, cluster: StandingCluster, start_python: StartPython, directory: Path) -> None:
        self._cluster = cluster
        self._start_python = start_python
        self._pythons = {name: start_python(ATOLL_ADDRESS=cluster.address) for name in ("trainer", "suspended")}
        self._progress = {name: directory / name / "progress" for name in self._pythons}
        self._version = self._pythons["trainer"].call(publish_numbers, 7.0)
        for name, python in self._pythons.items():
            self._progress[name].parent.mkdir()
            python.begin(step_on, 1_000_000, str(self._progress[name]))
            until_step(self._progress[name], 2)
        self.session = session_of(cluster, self._pythons["suspended"])
        assert ask(cluster, m.SuspendRequest(self.session, to_disk=True)).endswith("is suspended on disk")
        detached = start_python(ATOLL_ADDRESS=cluster.address)
        detached.call(begin, STEPS)
        detached.process.kill()
        detached.close()

    def goes_on(self, name: str = "trainer") -> None:
        """Wait until a script has made steps with the present controller."""
        until_step(self._progress[name], steps_at(self._progress[name]) + 3)

    def resume(self, *islands: int) -> None:
        assert "continues" in ask(self._cluster, m.ResumeRequest(self.session, islands, 60.0))
        self.goes_on("suspended")

    def attach(self) -> None:
        """Attach to the detached run. Fail unless its last version has the results of an undisturbed run."""
        attached = self._start_python(ATOLL_ADDRESS=self._cluster.address)
        step, _, weights = attached.call(attach, 0)
        assert (step, weights) == attached.call(step_on, STEPS)
        attached.close()

    def finish(self, *names: str) -> None:
        """End these scripts. Fail unless they have the results of undisturbed ones, and the published array exists."""
        for name in names:
            self._progress[name].with_name("stop").touch()
            steps, weights = self._pythons[name].finish()
            assert (steps, weights) == self._pythons[name].call(step_on, steps)
        assert self._pythons[names[0]].call(read_numbers, self._version) == {7.0}
        found = request_check(parse_address(self._cluster.address), "")
        assert [*found.contradictions, *found.differences] == []

    def end(self) -> str:
        """Return the error of the script that trains, whose cluster has ended."""
        with pytest.raises(RemoteError) as error:
            self._pythons["trainer"].finish()
        return str(error.value)

    def move(self, cluster: StandingCluster) -> None:
        self._cluster = cluster


@pytest.mark.parametrize("cluster", [("controller_main", "1x1x2")], indirect=True)
def test_everything_continues_with_the_next_version(
    cluster: Cluster, start_python: StartPython, tmp_path: Path
) -> None:
    scripts = Scripts(cluster.now, start_python, tmp_path)
    cluster.install_next()
    cluster.replace(NEXT)
    scripts.goes_on()
    scripts.resume()
    scripts.attach()
    scripts.finish("trainer", "suspended")


@pytest.mark.timeout(1800)
@pytest.mark.thorough
@pytest.mark.parametrize("cluster", [("1", "2x1x2")], indirect=True)
def test_this_version_replaces_the_next_one_unless_a_struct_excludes_it(
    cluster: Cluster, start_python: StartPython, tmp_path: Path
) -> None:
    scripts = Scripts(cluster.now, start_python, tmp_path)
    cluster.install_next()
    cluster.replace(NEXT)
    scripts.goes_on()
    # Also a worker and a script that start later have the next version.
    worker = cluster.now.worker(1)
    worker.kill()
    cluster.now.until(
        lambda report: (
            report["islands"][1]["state"] == "ready" and report["islands"][1]["hosts"][0]["pid"] != worker.pid
        ),
        SECONDS,
    )
    assert cluster.run(SCRIPT) == f"{NEXT} 28 [0, 0, 1, 1]\n"
    cluster.install_this()
    cluster.replace(atoll.__version__)
    scripts.goes_on()
    scripts.attach()
    cluster.install_next("99, oldest=99")
    cluster.kill_controller()
    cluster.now.wait()
    reason = rf"atoll [0-9.]+ stored version \d+ of 'history', and atoll {NEXT} reads version 99: continue with"
    assert re.search(f"the cluster has ended: the controller cannot run: .*{reason}", scripts.end())
    before = cluster.journal()
    with pytest.raises(AssertionError, match=reason):
        cluster.start()
    assert cluster.journal() == before
    cluster.install_this()
    scripts.move(cluster.start())
    scripts.resume(1)
    scripts.finish("suspended")
