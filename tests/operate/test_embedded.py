"""Tests of the command `atoll` with embedded clusters: real processes, in a runtime directory of the test."""

from __future__ import annotations

from pathlib import Path

from tests.cluster_process import User

LOOK = """
    import functools, json, os, subprocess, sys
    import jax

    # Like a daemon, the script has closed its standard streams.
    print = functools.partial(print, file=os.fdopen(os.dup(1), "w"))
    os.closerange(0, 2)

    def atoll(*arguments):
        command = [sys.executable, "-m", "atoll.operate.command", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    print(len(jax.devices()))
    report = json.loads(atoll("status", "--json").stdout)
    print([session["pid"] == os.getpid() for session in report["sessions"]])
    table = atoll("status", "--name", f"embedded-{os.getpid()}").stdout
    print(f"embedded-{os.getpid()} (python)" in table, "1x1x3" in table)
    print(atoll("down").stderr.strip()[:27])
"""


def test_a_script_under_atoll_run_can_look_at_its_own_cluster_and_not_end_it_by_accident(
    short_directory: Path, program_cache: Path
) -> None:
    with User(short_directory, program_cache, ATOLL_ISLANDS="1x1x3") as user:
        ended = user.script(LOOK, JAX_PLATFORMS="atoll").check()
    assert ended.stdout.splitlines() == ["3", "[True]", "True True", "atoll: no cluster is up (tr"]
