"""Files that are written completely or not at all."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.atomic_files import PARTIAL, write_atomically
from tests.prose import dotted, nodes_of
from tests.test_layers import modules

pytestmark = pytest.mark.together("sources")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"n"
        assert file.read_bytes() == b"old"
        yield b"ew"

    write_atomically(file, parts(), durable=True)
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"ne"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        write_atomically(file, parts())
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_partial_file_has_the_final_permissions_and_a_suffix_of_its_own(tmp_path: Path) -> None:
    found = []

    def parts() -> Iterator[bytes]:
        found.extend((each.suffix, stat.S_IMODE(each.stat().st_mode)) for each in tmp_path.iterdir())
        yield b"secret"

    before = os.umask(0)
    try:
        write_atomically(tmp_path / "private", parts())
        write_atomically(tmp_path / "public", b"", mode=0o644)
    finally:
        os.umask(before)
    assert found == [(PARTIAL, 0o600)]
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "public").stat().st_mode) == 0o644


def test_the_first_of_several_writers_creates_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"

    def parts() -> Iterator[bytes]:
        write_atomically(file, b"first", replace=False)
        yield b"second"

    with pytest.raises(FileExistsError, match=f"'{file}'$"):
        write_atomically(file, parts(), replace=False)
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file]


def test_a_durable_file_is_on_the_disk_before_its_name_and_its_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[bool, list[str]]] = []  # whether it is a directory, and the names at that time

    def fsync(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), [each.suffix for each in tmp_path.iterdir()]))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "quick.file", b"")
    assert synced == []
    (tmp_path / "quick.file").unlink()
    write_atomically(tmp_path / "durable.file", b"", durable=True)
    assert synced == [(False, [PARTIAL]), (True, [".file"])]


# Renames of files that are complete already.
_MOVES = {"atoll.cluster.usage.keeper", "atoll.journal.files"}


def test_files_are_replaced_by_this_function_only() -> None:
    """A hand-written one forgets the permissions, the disk, the partial file of a failure, or the name in an error."""
    found = {
        name
        for name, path in modules().items()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr == "rename"
        or (
            (node.func.attr == "replace" and (dotted(node.func.value) == "os" or len(node.args) == 1))
            and not node.keywords
            and dotted(node.func.value) not in ("dataclasses", "copy", "msgspec.structs")
        )
    }
    assert found - {"atoll.atomic_files"} == _MOVES
