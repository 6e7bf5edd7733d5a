"""Tests of commands whose standard output cannot be written."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.cluster_process import COMMAND

MANIFESTS = ("kubernetes", "--islands", "64x8x1", "--image", "x")


def run(arguments: tuple[str, ...], **streams: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, timeout=60, **streams)


@pytest.mark.parametrize("arguments", [("alerts",), ("ps",), ("--help",), MANIFESTS])
def test_a_full_disk_is_an_error_of_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = run(arguments, stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr == "atoll: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", [("alerts",), ("ps",), ("--help",), MANIFESTS])
def test_a_command_whose_reader_has_ended_ends_like_other_commands_and_says_nothing(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [("alerts",), ("ps",), ("--help",)])
def test_a_command_without_a_standard_output_succeeds(arguments):
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_output_has_the_encoding_that_the_environment_asks_for():
    command = [*COMMAND, "slurm", "--islands", "1x1x1", "--", "python", "büro.py"]
    shown = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True)
    assert shown.returncode == 0
    assert "büro.py".encode("latin-1") in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("logs", "--process", "wroker"), "--process 'wroker': expected engine, controller or worker"),
        ((*MANIFESTS, "--namespace", "My_Team"), "--namespace 'My_Team': expected up to 63 of a-z, 0-9 and -"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(arguments, expected):
    done = run(arguments, stdout=subprocess.DEVNULL)
    assert done.returncode == 2
    assert expected in done.stderr
