"""Tests that files of commands are written completely or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from atoll.operate.command import operator_commands
from atoll.operate.output_files import write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(b"old")
    write_whole(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"new")
    reader.join()
    assert read == [b"new"]
    assert pipe.is_fifo()


def test_a_file_in_no_directory_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        operator_commands._check_writable(tmp_path / "nope" / "x")
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err
        == f"atoll: cannot write {tmp_path}/nope/x: the directory {tmp_path}/nope does not exist\n"
    )


def test_a_directory_in_the_files_place_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(SystemExit):
        operator_commands._write(b"body", tmp_path / "x")
    assert capsys.readouterr().err == f"atoll: cannot write {tmp_path}/x: Is a directory\n"
